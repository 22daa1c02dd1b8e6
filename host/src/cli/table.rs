//! Formats rows as a plain text table with aligned columns. The first row is the header.

/// The lines of the table. The first `left` columns are left-aligned, the others right-aligned.
pub(super) fn of<const COLUMNS: usize>(rows: &[[String; COLUMNS]], left: usize) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut out = String::new();
    for row in rows {
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
