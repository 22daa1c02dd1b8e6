//! `statehouse policy test`: runs transcripts against a policy, without a server.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::cli::data::count;
use crate::cli::output::{Exit, Failure, emit, emit_either, one_line};
use statehouse_core::policy::on_one_line;
use statehouse_testkit::transcript::LoggedAt;
use statehouse_testkit::{Harness, conformance, transcript};

/// Run transcripts against a policy, and show every line that differs
///
/// The store runs in memory, with the code of `serve` and the clock of the transcript, so a
/// transcript always gives the same bytes. Every request runs twice: on an instance that handled
/// all earlier requests, and on a fresh one with the same state. If the two differ, the policy
/// keeps hidden state between requests, and the request is shown.
///
/// The lines that the policy logs are printed with the line of their request, except the cause of
/// a failure, which is printed with the failure.
///
/// Exit code 1 if the file is no policy, if a line differs that --update cannot correct, if the
/// policy fails at a request or when a key expires, or if it keeps hidden state. A failure is never
/// an expected result: --update does not write it.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse policy test setpoint.wasm tests/setpoint.txt
  statehouse policy test setpoint.wasm tests/           # every .txt file there
  statehouse policy test setpoint.wasm tests/new.txt --update
  statehouse policy test setpoint.wasm --conformance
  statehouse policy test setpoint.wasm tests/migration.txt --snapshot backup.statehouse

A transcript lists requests, responses and notifications:
  > SET setpoint/kitchen 21
  < +OK\\r\\n __ts=$v1
  > SET setpoint/kitchen hot
  < \"-ERR not a number\\r\\n\"
  client display
  display> KEYNOTIFY setpoint/kitchen
  display< +OK\\r\\n
  wait 500ms
The table in docs/policies.md, \"Transcripts\", has all lines and options.
--update adds or corrects the lines with < and !: write the requests, let it write the results, and
review them.")]
pub(in crate::cli) struct Args {
    /// The policy (.wasm component or core module), or `builtin` for the standard one
    pub(super) policy: PathBuf,

    /// Transcripts, or directories of transcripts
    #[arg(required_unless_present = "conformance")]
    pub(super) transcripts: Vec<PathBuf>,

    /// Also run the transcripts of the published protocol, in all dialects
    #[arg(long)]
    pub(super) conformance: bool,

    /// Start with the table of this backup, as `statehouse snapshot` writes it
    #[arg(long, value_name = "FILE")]
    pub(super) snapshot: Option<PathBuf>,

    /// Write the actual results into the transcripts
    #[arg(long)]
    pub(super) update: bool,

    /// Print a JSON object for each transcript, one per line
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let files = files(&args.transcripts)?;
    let mut harness = Harness::load(&args.policy).map_err(super::no_policy)?;
    if let Some(file) = &args.snapshot {
        harness = harness.on_snapshot(file)?;
    }
    let mut total = Total::default();
    for path in &files {
        let name = path.display().to_string();
        let text = read(path)?;
        let unreadable = |error| Failure::usage(format!("{name}: {error}"));
        let report = transcript::run(&harness, &text).map_err(unreadable)?;
        total.add(args, &name, &report)?;
        if args.update && report.written > 0 {
            fs::write(path, &report.corrected)
                .map_err(|error| Failure::usage(format!("cannot write {name}: {error}")))?;
            total.written += report.written;
            // A failed comparison or a missing client cannot be corrected by writing a line.
            let again = transcript::run(&harness, &report.corrected).map_err(unreadable)?;
            total.left += again.different.len() as u64;
        } else {
            total.left += report.different.len() as u64;
        }
    }
    if args.conformance {
        for (name, text) in conformance::TRANSCRIPTS {
            let report = transcript::run(&harness, text).map_err(Failure::negative)?;
            total.add(args, &format!("conformance/{name}"), &report)?;
            total.left += report.different.len() as u64;
        }
    }
    if !args.json {
        emit(total.summary().as_bytes())?;
    }
    Ok(Exit::of(total.hidden + total.left + total.failed == 0))
}

#[derive(Default)]
struct Total {
    transcripts: u64,
    requests: u64,
    /// Lines that --update wrote.
    written: u64,
    /// Lines that differ at the end.
    left: u64,
    hidden: u64,
    failed: u64,
}

impl Total {
    fn add(&mut self, args: &Args, name: &str, report: &transcript::Report) -> Result<(), Failure> {
        self.transcripts += 1;
        self.requests += report.requests;
        self.hidden += report.hidden.len() as u64;
        self.failed += report.failed.len() as u64;
        emit_either(args.json, || json(name, report), || text(name, report))?;
        Ok(())
    }

    fn summary(&self) -> String {
        let mut text = format!(
            "{}, {}: ",
            count(self.transcripts, "transcript"),
            count(self.requests, "request")
        );
        if self.written > 0 {
            text.push_str(&format!("{} written, ", count(self.written, "line")));
        }
        text.push_str(&match self.left {
            0 => "every line holds".to_owned(),
            1 => "1 line differs".to_owned(),
            number => format!("{number} lines differ"),
        });
        if self.failed > 0 {
            let lines = count(self.failed, "line");
            text.push_str(&format!(", the policy failed at {lines}"));
        }
        text.push_str(&match self.hidden {
            0 => ", no hidden state\n".to_owned(),
            number => format!(
                ", hidden state in {}: a fresh instance must answer like a used one, since redeliveries are re-executed on fresh instances\n",
                count(number, "line")
            ),
        });
        text
    }
}

fn text(name: &str, report: &transcript::Report) -> String {
    let mut text = String::new();
    let mut add = |line: usize, rows: &[(&str, &str)]| {
        text.push_str(&format!("{name}:{line}\n"));
        for (label, value) in rows {
            text.push_str(&format!("  {label:<21}{}\n", one_line(value)));
        }
    };
    for it in &report.different {
        let says = ("the transcript says", &*it.says);
        add(it.line, &[says, ("the policy says", &it.came)]);
    }
    for it in &report.failed {
        let request = ("the policy fails at", &*it.request);
        add(it.line, &[request, ("the cause is", &it.why)]);
    }
    // A failure that the policy logged, such as a panic, is shown above.
    let is_cause = |at: &LoggedAt| {
        let logged = on_one_line(&at.logged.text);
        let mut here = report.failed.iter().filter(|it| it.line == at.line);
        here.any(|it| matches!(it.why.strip_prefix(&logged), Some(rest) if rest.is_empty() || rest.starts_with(" (")))
    };
    for it in report.logged.iter().filter(|it| !is_cause(it)) {
        let logged = format!("{}: {}", it.logged.level, it.logged.text);
        add(it.line, &[("the policy logs", &logged)]);
    }
    for it in &report.hidden {
        let request = ("hidden state", &*it.request);
        add(it.line, &[request, ("it shows", &it.what)]);
    }
    text
}

fn json(name: &str, report: &transcript::Report) -> Json {
    json!({
        "transcript": name,
        "requests": report.requests,
        "different": report.different,
        "hidden_state": report.hidden,
        "failed": report.failed,
        "log": report.logged,
    })
}

/// The given transcripts; those of a directory in the order of their names.
fn files(named: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for path in named {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let unreadable = |error| Failure::usage(format!("cannot read {}: {error}", path.display()));
        let mut within = Vec::new();
        for entry in fs::read_dir(path).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?.path();
            if entry.extension().is_some_and(|it| it == "txt") {
                within.push(entry);
            }
        }
        if within.is_empty() {
            return Err(Failure::usage(format!(
                "{} contains no transcript: names of transcripts end in .txt",
                path.display()
            )));
        }
        within.sort();
        files.extend(within);
    }
    Ok(files)
}

pub(super) fn read(path: &Path) -> Result<String, Failure> {
    let unreadable = |error: &dyn std::fmt::Display| {
        Failure::usage(format!(
            "cannot read the transcript {}: {error}",
            path.display()
        ))
    };
    let max = statehouse_testkit::limits::TRANSCRIPT_BYTES_MAX;
    let mut bytes = Vec::new();
    File::open(path)
        .map_err(|error| unreadable(&error))?
        .take(max + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| unreadable(&error))?;
    if bytes.len() as u64 > max {
        return Err(unreadable(&format!("it has more than {max} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| unreadable(&error))
}
