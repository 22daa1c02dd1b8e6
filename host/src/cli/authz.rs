//! `statehouse authz`: what rules let whom do, and whether a file of rules is one.
//!
//! What enters: somebody, and what they want; the rules of a running store, or a file of them. What leaves: the rule that
//! decides, with its line, or the limit; where none does, rules that come near.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hyper::Method;
use serde_json::json;

use super::output::{self, Exit, Failure, printable};
use super::store::{Store, strange};
use crate::admin::{Ask, Told, Who, encode};
use statehouse_access::explain::{self, Explanation, Place, Question, Wanted, Why};
use statehouse_access::rules::{Action, Principal, Rules};

/// Say which rule decides what somebody may do
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse authz explain press-4 SET press-4/speed            # asks the store that runs in statehouse-data
  statehouse authz explain any GET limits --user operator --attribute building=17
  statehouse authz explain press-4 SUBSCRIBE 'sensors/+/temperature' --rules rules.toml
  statehouse authz check rules.toml
  statehouse serve --rules rules.toml

A running store goes by the rules that it has read last, and by its limits; of a client that is connected it knows the user and
the attributes. With --rules only that file is looked at, and no store has to run.

Rules are in TOML, with the names of Azure IoT Operations' BrokerAuthorization. They only allow: what no rule allows is
denied. A store that runs with them takes changes over within a second or two.

Exit codes of explain: 0 allowed, 1 denied, 3 no store runs; of check: 0 the file can be used. 2 a file that cannot be used,
or usage.")]
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

    /// The user that it logs in as, or that its certificate or token names [default: that of the connected client]
    #[arg(long, value_name = "NAME")]
    user: Option<Box<str>>,

    /// What its certificate or token says besides; may be given more than once
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    attribute: Vec<(Box<str>, Box<str>)>,

    /// A file of rules, to look at without a store
    // Not STATEHOUSE_RULES, which is of serve: who has it set would never ask the store.
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    #[command(flatten)]
    store: Store,
}

fn attribute(text: &str) -> Result<(Box<str>, Box<str>), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("an attribute is NAME=VALUE, such as building=17".to_owned()),
    }
}

/// Runs it.
pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    match &args.command {
        Command::Explain(args) => explain(args).await,
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

async fn explain(args: &ExplainArgs) -> Result<Exit, Failure> {
    let on = match (&args.key, args.command) {
        (None, Wanted::Connect) => &b""[..],
        (Some(_), Wanted::Connect) => {
            return Err(Failure::usage("CONNECT is about no key: leave it out"));
        }
        (None, _) => {
            return Err(Failure::usage(
                "name the key, with PUBLISH the topic, with SUBSCRIBE the topic filter",
            ));
        }
        (Some(key), _) => key.as_bytes(),
    };
    let told = match &args.rules {
        Some(file) => by_file(args, file, on)?,
        None => by_store(args, on).await?,
    };
    let text = match args.store.json {
        true => {
            json!({
                "allowed": told.is_allowed(),
                "connected": told.connected,
                "user": told.who.user,
                "attributes": told.who.attributes,
                "rules": told.rules,
                "explanation": told.explanation,
                "limit": told.limit,
                "note": told.note,
            })
            .to_string()
                + "\n"
        }
        false => in_words(args, &told, on),
    };
    output::emit(text.as_bytes())?;
    Ok(match told.is_allowed() {
        true => Exit::Done,
        false => Exit::Negative,
    })
}

/// By a file alone.
fn by_file(args: &ExplainArgs, file: &Path, on: &[u8]) -> Result<Told, Failure> {
    let rules = open(file)?;
    let who = Principal {
        client: &args.client,
        user: args.user.as_deref(),
        attributes: &args.attribute,
    };
    Ok(Told {
        rules: Some(file.to_owned()),
        connected: false,
        explanation: explain::explain(&rules, &who, Question::of(args.command, on)),
        who: Who {
            user: args.user.clone(),
            attributes: args.attribute.clone(),
        },
        limit: None,
        note: None,
    })
}

/// By what the running store says.
async fn by_store(args: &ExplainArgs, on: &[u8]) -> Result<Told, Failure> {
    let is_said = args.user.is_some() || !args.attribute.is_empty();
    let ask = Ask {
        client: args.client.clone(),
        who: is_said.then(|| Who {
            user: args.user.clone(),
            attributes: args.attribute.clone(),
        }),
        command: args.command,
        on: encode(on),
    };
    let body = serde_json::to_vec(&ask).map_err(strange)?;
    let answer = args.store.send(Method::POST, "/v1/authz", body).await?;
    serde_json::from_value(answer).map_err(strange)
}

fn in_words(args: &ExplainArgs, told: &Told, on: &[u8]) -> String {
    let question = Question::of(args.command, on);
    let verb = match question.action {
        Action::Connect => "connect",
        Action::Publish => "publish to",
        Action::Subscribe => "subscribe to",
        Action::Read => "read",
        Action::Write => "write",
    };
    let what = match question.on {
        [] => verb.to_owned(),
        on => format!("{verb} {}", printable(on)),
    };
    let name = printable(args.client.as_bytes());
    let file = told.rules.as_deref().unwrap_or(Path::new("rules"));
    let mut text = String::new();
    let it = &told.explanation;
    _ = match (&it.why, it.rules, it.allowed) {
        (Some(Why::Rule(place)), ..) => {
            writeln!(text, "allowed: {} lets {name} {what}", shown(file, place))
        }
        (Some(Why::OwnTopic), ..) => writeln!(
            text,
            "allowed: {name} may {what}, since rules let it touch keys and this is where only it hears of them"
        ),
        (None, true, _) => writeln!(text, "denied: no rule lets {name} {what}"),
        (None, false, true) => writeln!(
            text,
            "allowed: the store has no rules, so whoever is let in may {what}"
        ),
        (None, false, false) => writeln!(
            text,
            "denied: {name} may not {what}, since answers to other clients go there and the store has no rules that say who may"
        ),
    };
    if !it.allowed && it.rules {
        near(&mut text, file, it, question.action);
    }
    if let Some(limit) = &told.limit {
        _ = writeln!(text, "denied at present: {}", printable(limit.as_bytes()));
    }
    if let Some(note) = &told.note {
        _ = writeln!(text, "note: {}", printable(note.as_bytes()));
    }
    if args.rules.is_none() {
        standing(&mut text, &name, told);
    }
    if question.action != Action::Connect && !it.may_connect {
        _ = writeln!(
            text,
            "note: no rule lets it connect to the store's own broker"
        );
    }
    text
}

/// Who a running store took it for.
fn standing(text: &mut String, name: &str, told: &Told) {
    let user = match &told.who.user {
        Some(user) => format!("the user {}", printable(user.as_bytes())),
        None => "no user".to_owned(),
    };
    let mut who = user;
    for (name, value) in &told.who.attributes {
        let pair = format!("{name}={value}");
        _ = write!(who, ", {}", printable(pair.as_bytes()));
    }
    _ = match told.connected {
        true => writeln!(text, "{name} is connected; asked about as {who}"),
        false => writeln!(text, "{name} is not connected; asked about as {who}"),
    };
}

/// What it would take, and rules that come near.
fn near(text: &mut String, file: &Path, it: &Explanation, action: Action) {
    let takes = match action {
        Action::Connect => "brokerResources with the method Connect",
        Action::Publish => "brokerResources with the method Publish",
        Action::Subscribe => "brokerResources with the method Subscribe",
        Action::Read => "stateStoreResources with the method Read or ReadWrite",
        Action::Write => "stateStoreResources with the method Write or ReadWrite",
    };
    _ = writeln!(text, "it would take {takes} in a rule for it");
    for place in &it.on_others {
        _ = writeln!(
            text,
            "for it, but for something else: {}",
            shown(file, place)
        );
    }
    for place in &it.for_others {
        _ = writeln!(text, "for others: {}", shown(file, place));
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

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::Args;

    #[test]
    fn who_has_the_variables_of_serve_still_asks_the_store() {
        let command = Args::augment_args(Command::new("authz"));
        let explain = command.find_subcommand("explain").unwrap();
        let rules = explain.get_arguments().find(|it| it.get_id() == "rules");
        assert_eq!(rules.unwrap().get_env(), None);
    }
}
