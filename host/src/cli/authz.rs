//! `statehouse authz`: what rules let whom do, and whether a file of rules is one.
//!
//! What enters: a file of rules, somebody, and what they want. What leaves: the rule that decides, with its line; where none
//! does, those that come near.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::output::{self, Exit, Failure, printable};
use crate::access::explain::{self, Place, Question, Why};
use crate::access::rules::{Action, Principal, Rules};

/// Of rules that come near, how many are shown.
const SHOWN_MAX: usize = 5;

/// Say which rule decides what somebody may do
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse authz check rules.toml
  statehouse authz explain press-4 SET press-4/speed --rules rules.toml
  statehouse authz explain any GET limits --user operator --attribute building=17 --rules rules.toml
  statehouse authz explain press-4 SUBSCRIBE 'sensors/+/temperature' --rules rules.toml
  statehouse serve --rules rules.toml

Rules are in TOML, with the names of Azure IoT Operations' BrokerAuthorization. They only allow: what no rule allows is
denied. A store that runs with them takes changes over within a second.

Exit codes of explain: 0 allowed, 1 denied; of check: 0 the file can be used. 2 a file that cannot be used, or usage.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Say whether somebody may do something, and which rule says so
    Explain(ExplainArgs),
    /// Read a file of rules, count them, and point at what can never match
    Check {
        /// The file
        file: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct ExplainArgs {
    /// The client id
    client: String,

    /// What it wants to do. A SCAN lists the keys that may be read
    #[arg(value_enum, ignore_case = true)]
    command: Wanted,

    /// The key: any bytes. With PUBLISH the topic, with SUBSCRIBE the topic filter, with CONNECT nothing
    key: Option<OsString>,

    /// The user that it logs in as, or that its certificate or token names
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// What its certificate or token says besides; may be given more than once
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    attribute: Vec<(Box<str>, Box<str>)>,

    /// The rules
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_RULES")]
    rules: PathBuf,
}

/// What somebody may want to do, as they would ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "UPPER")]
enum Wanted {
    Get,
    Set,
    Del,
    Vdel,
    Keynotify,
    Scan,
    Connect,
    Publish,
    Subscribe,
}

fn attribute(text: &str) -> Result<(Box<str>, Box<str>), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("an attribute is NAME=VALUE, such as building=17".to_owned()),
    }
}

/// Runs it.
pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    match &args.command {
        Command::Explain(args) => explain(args),
        Command::Check { file } => check(file),
    }
}

fn open(path: &Path) -> Result<Rules, Failure> {
    Rules::open(path).map_err(|error| Failure::usage(error.to_string()))
}

fn check(path: &Path) -> Result<Exit, Failure> {
    let rules = open(path)?;
    let doubts = explain::doubts(&rules);
    let mut text = format!("{}: {}\n", path.display(), count(rules.len()));
    for (line, doubt) in doubts {
        _ = writeln!(text, "line {line}: {doubt}");
    }
    output::emit(text.as_bytes())?;
    Ok(Exit::Done)
}

fn count(rules: usize) -> String {
    match rules {
        1 => "1 rule".to_owned(),
        _ => format!("{rules} rules"),
    }
}

fn explain(args: &ExplainArgs) -> Result<Exit, Failure> {
    let (action, verb) = match args.command {
        Wanted::Get | Wanted::Keynotify | Wanted::Scan => (Action::Read, "read"),
        Wanted::Set | Wanted::Del | Wanted::Vdel => (Action::Write, "write"),
        Wanted::Connect => (Action::Connect, "connect"),
        Wanted::Publish => (Action::Publish, "publish to"),
        Wanted::Subscribe => (Action::Subscribe, "subscribe to"),
    };
    let on = match (&args.key, action) {
        (None, Action::Connect) => &b""[..],
        (Some(_), Action::Connect) => {
            return Err(Failure::usage("CONNECT is about no key: leave it out"));
        }
        (None, _) => {
            return Err(Failure::usage(
                "name the key, with PUBLISH the topic, with SUBSCRIBE the topic filter",
            ));
        }
        (Some(key), Action::Subscribe) => of_topics(key.as_bytes()),
        (Some(key), _) => key.as_bytes(),
    };
    let rules = open(&args.rules)?;
    let who = Principal {
        client: &args.client,
        user: args.user.as_deref(),
        attributes: &args.attribute,
    };
    let question = Question { action, on };
    let what = match on {
        [] => verb.to_owned(),
        on => format!("{verb} {}", printable(on)),
    };
    let name = printable(args.client.as_bytes());
    let mut text = String::new();
    let allowed = match explain::why(&rules, &who, question) {
        Some(Why::Rule(place)) => {
            _ = writeln!(
                text,
                "allowed: {} lets {name} {what}",
                shown(&args.rules, &place)
            );
            true
        }
        Some(Why::OwnTopic) => {
            _ = writeln!(
                text,
                "allowed: {name} may {what}, since rules let it touch keys and this is where only it hears of them"
            );
            true
        }
        None => {
            _ = writeln!(text, "denied: no rule lets {name} {what}");
            near(&mut text, args, &rules, &who, question);
            false
        }
    };
    let connect = Question {
        action: Action::Connect,
        on: b"",
    };
    if action != Action::Connect && explain::why(&rules, &who, connect).is_none() {
        _ = writeln!(
            text,
            "note: no rule lets it connect to the store's own broker"
        );
    }
    output::emit(text.as_bytes())?;
    Ok(if allowed { Exit::Done } else { Exit::Negative })
}

/// The topic filter of a shared subscription, `$share/GROUP/FILTER` (MQTT 5 section 4.8.2); of another one, itself.
fn of_topics(filter: &[u8]) -> &[u8] {
    let group = filter.strip_prefix(b"$share/");
    let behind = group.and_then(|it| it.splitn(2, |byte| *byte == b'/').nth(1));
    behind.unwrap_or(filter)
}

/// What it would take, and rules that come near.
fn near(
    text: &mut String,
    args: &ExplainArgs,
    rules: &Rules,
    who: &Principal<'_>,
    question: Question<'_>,
) {
    let takes = match question.action {
        Action::Connect => "brokerResources with the method Connect",
        Action::Publish => "brokerResources with the method Publish",
        Action::Subscribe => "brokerResources with the method Subscribe",
        Action::Read => "stateStoreResources with the method Read or ReadWrite",
        Action::Write => "stateStoreResources with the method Write or ReadWrite",
    };
    _ = writeln!(text, "it would take {takes} in a rule for it");
    let file = &args.rules;
    for place in explain::on_others(rules, who, question.action).take(SHOWN_MAX) {
        _ = writeln!(
            text,
            "for it, but for something else: {}",
            shown(file, &place)
        );
    }
    for place in explain::for_others(rules, who, question).take(SHOWN_MAX) {
        _ = writeln!(text, "for others: {}", shown(file, &place));
    }
}

fn shown(file: &Path, place: &Place) -> String {
    let Place { rule, line, text } = place;
    let file = file.display();
    match text {
        None => format!("rule {rule} ({file}, line {line})"),
        Some(text) => {
            let text = printable(text.as_bytes());
            format!("rule {rule} ({file}, line {line}: `{text}`)")
        }
    }
}
