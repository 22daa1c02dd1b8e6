//! Formats rows as a plain text table with aligned columns.

use super::output::printable;

/// Longest name in a table.
pub(super) const CELL_CHARS_MAX: usize = 64;

/// The lines of the table. The first `left` columns are left-aligned, the others right-aligned.
pub(super) fn of<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
    left: usize,
) -> String {
    let mut all = vec![header.map(str::to_owned)];
    all.extend(rows);
    let width = |column: usize| {
        let cells = all.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut out = String::new();
    for row in all {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            match column < left {
                true => line.push_str(&format!("{cell:<width$}  ")),
                false => line.push_str(&format!("{cell:>width$}  ")),
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// A name in a table, shortened since clients choose it; `--json` prints the whole name.
pub(super) fn cell(name: &str) -> String {
    shortened(printable(name.as_bytes()), CELL_CHARS_MAX)
}

pub(super) fn cell_or_dash(name: Option<&str>) -> String {
    name.map_or("-".to_owned(), cell)
}

/// The beginning of a text for a cell.
pub(super) fn shortened(whole: String, chars_max: usize) -> String {
    match whole.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &whole[..end]),
        None => whole,
    }
}
