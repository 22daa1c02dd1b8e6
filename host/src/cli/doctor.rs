//! `statehouse doctor`: checks a data directory and reports what it found.

use std::fmt::Display;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use statehouse_wal::{
    DiskUse, Error, FileReport, Kind, LogPosition, Verdict, probe, probe_leftovers, probe_lock,
};

use super::data::{self, ByContext};
use super::output::{Exit, Failure, emit, emit_json, notice, one_line, printable};
use super::snapshot::{absent_modules, contents_json, contents_text, state_text, target};
use super::time::utc;
use crate::data_directory::{ClientIdError, StorageError, check_client_id};
use statehouse_core::clock::wall_ms;
use statehouse_offline::{Checkup, Opening, Past, PastError, Reach, Salvaged};

/// Check a data directory and say what is in it
///
/// Reads every file, decodes every record and block, and compares every policy module with its
/// digest. Measures the disk: the size of the files, the free space, and whether the store refuses
/// writes because the disk is full. Changes nothing and takes no lock, so it also runs while a
/// server uses the directory, and on a directory that a start refuses. Exit code 1 if it finds a
/// problem.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse doctor
  statehouse doctor /var/lib/statehouse --json
  statehouse doctor /var/lib/statehouse --salvage rescued.statehouse")]
pub(super) struct Args {
    /// The data directory of a store [default: that of the context, or statehouse-data]
    #[arg(value_name = "DIR", env = "STATEHOUSE_DATA")]
    data: Option<PathBuf>,

    /// Write everything that is readable, up to the damage, to a backup. If only a snapshot without
    /// its log is left, not all keys are as of the same record, and the output says so. Fails if no
    /// state can be read: restore a backup then
    #[arg(long, value_name = "FILE")]
    salvage: Option<PathBuf>,

    /// Let --salvage replace an existing file
    #[arg(long, requires = "salvage")]
    force: bool,

    /// Print the findings as a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    context: ByContext,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let directory = args.context.directory(args.data.as_deref())?;
    let salvage = args.salvage.as_ref();
    let target = |file: &Path| target(file, args.force, &directory);
    let salvage = salvage.map(|file| Ok::<_, Failure>((file, target(file)?)));
    let salvage = salvage.transpose()?;
    let past = Past::open(&directory)?;
    let mut checkup = past.checkup()?;
    let refusals = refusals(&past)?;
    // The text of a refusal names the file to correct.
    let needs_advice = !checkup.is_well();
    let is_refused = !refusals.is_empty();
    checkup.problems.extend(refusals);
    if !args.json {
        emit(in_words(&directory, &checkup).as_bytes())?;
    }
    let (mut salvaged, mut failed) = (None, None);
    if let Some((file, target)) = &salvage {
        match past.salvage(target, wall_ms()) {
            Ok(it) => salvaged = Some((*file, it)),
            Err(error) => failed = Some(error),
        }
    }
    if args.json {
        let salvaged = salvaged.as_ref().map(|(_, salvaged)| salvaged);
        emit_json(&in_json(&directory, &checkup, salvaged))?;
    } else if let Some((file, salvaged)) = &salvaged {
        emit(rescued(file, salvaged).as_bytes())?;
    } else if needs_advice && args.salvage.is_none() {
        emit(advice(&past, &checkup, is_refused).as_bytes())?;
    }
    match (checkup.is_well(), failed) {
        (true, None) => Ok(Exit::Done),
        // The salvage failed, and nothing else is wrong.
        (true, Some(error)) => Err(error.into()),
        (false, failed) => {
            // The findings decide the exit code.
            if let Some(error) = failed {
                notice(&format!("the salvage failed: {error}"));
            }
            Ok(Exit::Negative)
        }
    }
}

/// Why a start refuses the files next to the log: the lock, spare and incomplete files, the
/// directory of policies, and the name of the store. A host of a cluster needs only the lock. The
/// rights of this account do not count, because it may not be that of the store.
fn refusals(past: &Past) -> Result<Vec<String>, Failure> {
    let refused = |error: &dyn Display| format!("a start refuses this: {error}");
    let mut found = Vec::new();
    found.extend(probe_lock(past.path()).err().map(|it| refused(&it)));
    if past.mark().is_some() {
        return Ok(found);
    }
    found.extend(probe_leftovers(past.path()).err().map(|it| refused(&it)));
    let policies = probe(past.modules().directory()).err();
    let is_no_directory = |error: &Error| matches!(error, Error::Io { source, .. } if source.kind() == ErrorKind::AlreadyExists);
    let policies = policies.filter(is_no_directory);
    found.extend(policies.map(|it| refused(&it)));
    match check_client_id(past.path()) {
        Ok(()) => {}
        Err(StorageError::ClientId(path, ClientIdError::Io(error)))
            if error.kind() == ErrorKind::PermissionDenied =>
        {
            return Err(PastError::Unreadable(path, error.to_string()).into());
        }
        Err(error) => found.push(refused(&error)),
    }
    Ok(found)
}

fn in_words(directory: &Path, it: &Checkup) -> String {
    let mut text = format!("{}\n\n", directory.display());
    // The modules of policies are listed below, one by one.
    let is_file = |file: &&FileReport| file.kind != Kind::Other || file.name != "policies";
    for file in it.files.iter().filter(is_file) {
        text.push_str(&format!("  {}\n", file_text(file)));
    }
    text.push_str(&format!(
        "\n{} in snapshots and {} of the log were decoded\n",
        data::count(it.blocks, "block"),
        data::count(it.records, "record")
    ));
    if let Ok(Opening { contents, reach }) = &it.opening {
        text.push_str(&format!("a start finds {}\n", contents_text(contents)));
        for module in &contents.policies {
            let active = if module.active { ", which answers" } else { "" };
            text.push_str(&format!(
                "the policy {}{active}: {}\n",
                data::policy(&module.policy),
                state_text(&module.state)
            ));
        }
        if let Some(reach) = reach {
            text.push_str(&format!("{}\n", reach_text(reach)));
        }
    }
    text.push_str(&disk_text(&it.disk));
    text.push('\n');
    for note in &it.notes {
        text.push_str(&format!("note: {}\n", one_line(note)));
    }
    for problem in &it.problems {
        text.push_str(&format!("WRONG: {}\n", one_line(problem)));
    }
    if it.is_well() {
        text.push_str(conclusion(&it.disk));
    }
    text
}

/// The last line about a directory without problems.
fn conclusion(it: &DiskUse) -> &'static str {
    match (it.read_only, it.refuses_writes) {
        (true, _) => "the files are well, and the file system is read-only\n",
        (false, true) => "the files are well, and the disk is full\n",
        (false, false) => "all is well\n",
    }
}

fn disk_text(it: &DiskUse) -> String {
    let bytes = |count| data::count(count, "byte");
    let mut text = format!(
        "on the disk: log {}, snapshot {}, history {}, spare segments {}",
        bytes(it.log),
        bytes(it.snapshot),
        bytes(it.history),
        bytes(it.spares)
    );
    if it.temporary > 0 {
        text.push_str(&format!(", unfinished files {}", bytes(it.temporary)));
    }
    text.push_str(&format!("; free {}\n", bytes(it.free)));
    text.push_str(match (it.no_free_inodes, it.refuses_writes) {
        _ if it.read_only => "the file system is read-only: a start refuses it\n",
        (true, _) => {
            "the file system reports no free inodes: if that is so, the store can create no file. Remove files from it\n"
        }
        (false, true) => {
            "the store refuses writes because the disk is full: free disk space, or remove keys\n"
        }
        (false, false) => "there is room for writes\n",
    });
    text
}

fn disk_json(it: &DiskUse) -> Json {
    json!({
        "log_bytes": it.log,
        "snapshot_bytes": it.snapshot,
        "history_bytes": it.history,
        "spare_bytes": it.spares,
        "temporary_bytes": it.temporary,
        "free_bytes": it.free,
        "no_free_inodes": it.no_free_inodes,
        "read_only": it.read_only,
        "refuses_writes": it.refuses_writes,
    })
}

fn reach_text(reach: &Reach) -> String {
    if reach.base == LogPosition::NONE {
        return format!(
            "the history reaches back to the beginning of the store, {} ago",
            data::count(reach.end.0, "record")
        );
    }
    format!(
        "the history reaches back to {}, record {}; states are exact from record {} on",
        utc(reach.base_ms),
        reach.base.0 + 1,
        reach.exact
    )
}

/// The purpose of a file that is not part of the log.
fn other(name: &str) -> &'static str {
    match name {
        "admin" => "address and token of the admin API",
        "cluster.json" => "mark of a host of a cluster",
        "cluster-process" => "id of the last process in the cluster",
        "code" => "machine code of policies",
        "mqtt-client-id" => "name of the store",
        _ => "not a file of a store",
    }
}

fn file_text(file: &FileReport) -> String {
    let what = match file.kind {
        Kind::Segment(_) => "log",
        Kind::Snapshot(_) => "snapshot",
        Kind::Spare(_) => "spare log",
        Kind::DamagedSnapshot(_) => "snapshot put aside",
        Kind::Closed => "marker of a clean end",
        Kind::Newest => "record of the newest log file",
        Kind::Lock => "lock",
        Kind::Temporary => "temporary",
        Kind::Other => other(&file.name),
    };
    let records = match (file.kind, file.first, file.last) {
        (Kind::Segment(_), Some(first), Some(last)) => format!(", records {first} to {last}"),
        (Kind::Segment(_), Some(_), None) => ", no records".to_owned(),
        (Kind::Snapshot(_), Some(first), _) => format!(", as of record {first}"),
        (Kind::Closed | Kind::Newest, _, Some(last)) => format!(", at record {last}"),
        _ => String::new(),
    };
    let name = printable(file.name.as_bytes());
    let bytes = data::count(file.bytes, "byte");
    match file.kind {
        Kind::Other => format!("{name}  {what}, {bytes}"),
        _ => format!("{name}  {what}, {bytes}{records}: {}", file.verdict),
    }
}

/// The next steps for the operator. `is_refused` is true if a start refuses other files than those
/// of the log.
fn advice(past: &Past, it: &Checkup, is_refused: bool) -> String {
    let directory = past.path().display();
    if it.holds_nothing() {
        return "\nIs it the directory of the store? `statehouse serve --data` names it.\n"
            .to_owned();
    }
    match &it.opening {
        Err(_) if it.of_later_version => {
            "\nWhat next: nothing is damaged. Install the version of the program that wrote it, or a later one.\n"
                .to_owned()
        }
        Err(_) if !past.is_salvageable() => format!(
            "\nWhat next: keep a copy of {directory} as it is. No consistent state can be read from it: restore a backup with `statehouse restore BACKUP --data NEW`.\n"
        ),
        Err(_) => format!(
            "\nWhat next: keep a copy of {directory} as it is. Restore a backup with `statehouse restore BACKUP --data NEW`, or save what can still be read with `statehouse doctor {directory} --salvage FILE` and restore that.\n"
        ),
        Ok(opening) => {
            let mut modules = opening.contents.policies.iter();
            let is_refused = is_refused || it.disk.read_only;
            let start = match is_refused || modules.any(|it| it.prevents_start()) {
                true => {
                    "the newest state can be read. Correct each problem that prevents a start, and the store has this state"
                }
                false => "the store can start and has its newest state",
            };
            format!(
                "\nWhat next: {start}. Take a backup now with `statehouse snapshot FILE --data {directory}`, and check the disk: it may damage more data.\n"
            )
        }
    }
}

fn rescued(file: &Path, it: &Salvaged) -> String {
    let mut text = format!(
        "wrote {}: {}\n",
        file.display(),
        contents_text(&it.contents)
    );
    if let Some(end) = it.blurred_up_to {
        text.push_str(&format!(
            "The log that completes the snapshot is lost: each key is as of some record before {end}, and not all are as of the same record.\n"
        ));
    }
    let absent = absent_modules(&it.contents);
    for module in &absent {
        text.push_str(&format!("{module}\n"));
    }
    text.push_str(match (it.whole, absent.is_empty()) {
        (true, true) => "Nothing is missing in it.\n",
        (true, false) => "Nothing else is missing in it.\n",
        (false, _) => {
            "What came later is lost. Create a data directory from the backup with `statehouse restore`.\n"
        }
    });
    text
}

fn in_json(directory: &Path, it: &Checkup, salvaged: Option<&Salvaged>) -> Json {
    let files = it.files.iter().map(|file| {
        let position = |position: Option<LogPosition>| position.map(|it| it.0);
        json!({
            "name": file.name,
            "bytes": file.bytes,
            "first": position(file.first),
            "last": position(file.last),
            "well": !matches!(
                file.verdict,
                Verdict::Damaged { .. } | Verdict::UnknownFormat { .. }
            ),
            "found": file.verdict.to_string(),
        })
    });
    let opening = it.opening.as_ref();
    let reach = opening.ok().and_then(|opening| opening.reach);
    json!({
        "directory": directory.display().to_string(),
        "well": it.is_well(),
        "files": files.collect::<Vec<_>>(),
        "disk": disk_json(&it.disk),
        "blocks": it.blocks,
        "records": it.records,
        "holds": opening.ok().map(|opening| contents_json(&opening.contents)),
        "refused": opening.err(),
        "history": reach.map(|reach| json!({
            "from_record": reach.base.0 + 1,
            "since": (reach.base != LogPosition::NONE).then(|| utc(reach.base_ms)),
            "exact_from_record": reach.exact.0,
            "to_record": reach.end.0,
        })),
        "notes": it.notes,
        "problems": it.problems,
        "salvaged": salvaged.map(|it| json!({
            "holds": contents_json(&it.contents),
            "whole": it.whole,
            "blurred_up_to": it.blurred_up_to.map(|it| it.0),
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: there was room for writes, and all was well.
    #[test]
    fn read_only_file_system_has_no_room_for_writes() {
        let mut disk = DiskUse::default();
        assert!(disk_text(&disk).ends_with("there is room for writes\n"));
        assert_eq!(conclusion(&disk), "all is well\n");
        disk.read_only = true;
        assert!(disk_text(&disk).ends_with("the file system is read-only: a start refuses it\n"));
        assert!(conclusion(&disk).ends_with("the file system is read-only\n"));
        assert_eq!(disk_json(&disk)["read_only"], true);
    }
}
