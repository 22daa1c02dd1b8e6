//! `statehouse authz`: explains authorization decisions and checks rules files.
//!
//! Prints the rule that decides, with its line, or the limit; if no rule decides, it prints rules
//! that nearly match.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hyper::Method;
use serde_json::{Value as Json, json};

use super::data::count;
use super::output::{Exit, Failure, emit, emit_either, one_line, printable};
use super::remote::Certificates;
use super::store::{Named, unexpected};
use crate::admin::{ASSIGNED_ID, Ask, Decision, Who, reserved};
use statehouse_access::explain::{self, Explanation, Place, Question, Wanted, Why};
use statehouse_access::rules::{Action, Principal, Rules};
use statehouse_config::percent;

/// Explain which rule decides what a client may do, or check a rules file
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse authz explain press-4 SET press-4:speed     # asks the store of statehouse-data
  statehouse authz explain any GET limits --user operator --attribute building=17
  statehouse authz explain press-4 SUBSCRIBE 'sensors/+/temperature' --rules rules.toml
  statehouse authz check rules.toml
  statehouse serve --rules rules.toml

A running store applies its current rules, and knows the user and the attributes of a connected
client. It also names a quota or a limit that would refuse the action at present, but not a rate
limit. With --rules only that file is evaluated, and no store needs to run. A store behind a foreign
broker decides only about keys, and only by the client id.

Rules are in TOML, with the names of Azure IoT Operations' BrokerAuthorization. Rules can only
allow: an action that no rule allows is denied. A running store reloads its rules within two
seconds.

Exit codes of explain: 0 allowed, 1 denied, 3 no store runs; of check: 0 the file is valid. Of both:
2 usage or an invalid file.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Explain whether a client may do something, and which rule decides
    Explain(Box<ExplainArgs>),
    /// Parse a rules file, count its rules, and report rules that can never match
    Check {
        /// The rules file
        file: PathBuf,
    },
}

/// The help of --admin: other commands have options of an account.
const ADMIN_HELP: &str = "The address of the admin API instead: https://HOST:PORT, http://ADDR:PORT, or unix:PATH; those of all hosts of a cluster with commas. The host that leads answers. It needs the store's token in STATEHOUSE_ADMIN_TOKEN, except at unix:PATH; --context logs in as a user";

#[derive(Debug, clap::Args)]
#[command(mut_arg("admin", |it| it.help(ADMIN_HELP)))]
struct ExplainArgs {
    /// The client id
    client: String,

    /// The action. SCAN lists only the keys that the client may read
    #[arg(value_enum, ignore_case = true)]
    command: Wanted,

    /// The key: any bytes but NUL. With PUBLISH the topic, with SUBSCRIBE the topic filter, with
    /// CONNECT nothing
    key: Option<OsString>,

    /// The user name, from a login, a certificate or a token [default: that of the connected
    /// client]
    #[arg(long, value_name = "NAME")]
    user: Option<Box<str>>,

    /// An attribute from its certificate or token; may be given more than once [default: those of
    /// the connected client]
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    attribute: Vec<(Box<str>, Box<str>)>,

    /// A rules file to evaluate instead of asking a running store
    // Does not read STATEHOUSE_RULES, which belongs to serve: an exported variable would keep this
    // command from asking the store.
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    #[command(flatten)]
    store: Named,

    #[command(flatten)]
    certificates: Certificates,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn attribute(text: &str) -> Result<(Box<str>, Box<str>), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("an attribute is NAME=VALUE, such as building=17".to_owned()),
    }
}

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
    let connect = explain::connect_warning(&rules).into_iter();
    let doubts = connect.chain(explain::warnings(&rules));
    let mut text = format!(
        "{}: {}\n",
        path.display(),
        count(rules.count() as u64, "rule")
    );
    for (line, doubt) in doubts {
        _ = writeln!(text, "line {line}: {doubt}");
    }
    emit(text.as_bytes())?;
    Ok(Exit::Done)
}

async fn explain(args: &ExplainArgs) -> Result<Exit, Failure> {
    let on = match (&args.key, args.command) {
        (None, Wanted::Connect) => &b""[..],
        (Some(_), Wanted::Connect) => {
            return Err(Failure::usage("CONNECT takes no key: remove it"));
        }
        (None, _) => {
            return Err(Failure::usage(
                "name the key, with PUBLISH the topic, with SUBSCRIBE the topic filter",
            ));
        }
        (Some(key), _) => key.as_bytes(),
    };
    explain::check(args.command, on).map_err(Failure::usage)?;
    let decision = match &args.rules {
        Some(file) => by_file(args, file, on)?,
        None => by_store(args, on).await?,
    };
    emit_either(
        args.json,
        || in_json(&decision),
        || in_words(args, &decision, on),
    )?;
    Ok(Exit::of(decision.is_allowed()))
}

fn in_json(it: &Decision) -> Json {
    json!({
        "allowed": it.is_allowed(),
        "connected": it.connected,
        "behind_broker": it.behind_broker,
        "user": it.who.user,
        "attributes": it.who.attributes,
        "rules": it.rules,
        "explanation": it.explanation,
        "limit": it.limit,
        "reserved": it.reserved,
        "note": it.note,
    })
}

/// Decides by a rules file alone.
fn by_file(args: &ExplainArgs, file: &Path, on: &[u8]) -> Result<Decision, Failure> {
    let rules = open(file)?;
    let who = Principal {
        client: &args.client,
        user: args.user.as_deref(),
        attributes: &args.attribute,
    };
    let question = Question::of(args.command, on);
    // Behind a foreign broker, rules also decide about keys of requests that name no client.
    if args.client.is_empty() && !matches!(question.action, Action::Read | Action::Write) {
        return Err(Failure::usage(ASSIGNED_ID));
    }
    Ok(Decision {
        rules: Some(file.to_owned()),
        connected: false,
        behind_broker: false,
        explanation: explain::explain(&rules, &who, question),
        reserved: reserved(&args.client, question),
        who: Who {
            user: args.user.clone(),
            attributes: args.attribute.clone(),
        },
        limit: None,
        note: None,
    })
}

async fn by_store(args: &ExplainArgs, on: &[u8]) -> Result<Decision, Failure> {
    let is_said = args.user.is_some() || !args.attribute.is_empty();
    let ask = Ask {
        client: args.client.clone(),
        who: is_said.then(|| Who {
            user: args.user.clone(),
            attributes: args.attribute.clone(),
        }),
        command: args.command,
        on: percent::encode(on),
    };
    let body = serde_json::to_vec(&ask).map_err(unexpected)?;
    let answer = args
        .store
        .asked(&args.certificates)?
        .send(Method::POST, "/v1/authz", body)
        .await?;
    serde_json::from_value(answer).map_err(unexpected)
}

fn in_words(args: &ExplainArgs, decision: &Decision, on: &[u8]) -> String {
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
    let file = decision.rules.as_deref().unwrap_or(Path::new("rules"));
    if let Some(reason) = &decision.reserved {
        return format!("denied: {name} may not {what}: {}\n", one_line(reason));
    }
    let mut text = String::new();
    let it = &decision.explanation;
    _ = match (&it.why, it.rules, it.allowed) {
        (Some(Why::Rule(place)), ..) => {
            writeln!(text, "allowed: {} lets {name} {what}", shown(file, place))
        }
        (Some(Why::OwnTopic), ..) => writeln!(
            text,
            "allowed: {name} may {what}, since rules let it access keys, and responses and notifications to it are published there"
        ),
        (None, true, _) => writeln!(text, "denied: no rule lets {name} {what}"),
        (None, false, true) => writeln!(
            text,
            "allowed: the store has no rules, so every connected client may {what}"
        ),
        (None, false, false) => writeln!(
            text,
            "denied: {name} may not {what}, since responses to other clients are published there, and the store has no rules that allow it"
        ),
    };
    if !it.allowed && it.rules {
        near(&mut text, file, it, question.action);
    }
    if let Some(limit) = &decision.limit {
        _ = writeln!(text, "denied at present: {}", one_line(limit));
    }
    if let Some(note) = &decision.note {
        _ = writeln!(text, "note: {}", one_line(note));
    }
    if decision.behind_broker {
        return text;
    }
    if args.rules.is_none() {
        standing(&mut text, &name, decision);
    }
    if question.action != Action::Connect && !it.may_connect {
        _ = writeln!(
            text,
            "note: no rule lets it connect to the store's own broker"
        );
    }
    text
}

/// The identity that the decision is based on.
fn standing(text: &mut String, name: &str, decision: &Decision) {
    let mut who = match &decision.who.user {
        Some(user) => format!("the user {}", printable(user.as_bytes())),
        None => "no user".to_owned(),
    };
    for (name, value) in &decision.who.attributes {
        let pair = format!("{name}={value}");
        _ = write!(who, ", {}", printable(pair.as_bytes()));
    }
    let not = if decision.connected { "" } else { "not " };
    _ = writeln!(text, "{name} is {not}connected; asked about as {who}");
}

/// What a rule would have to allow, and rules that nearly match.
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
            let text = one_line(text);
            format!("rule {rule} ({file}, line {line}: `{text}`)")
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::Args;

    #[test]
    fn the_variables_of_serve_do_not_disable_the_store() {
        let command = Args::augment_args(Command::new("authz"));
        let explain = command.find_subcommand("explain").unwrap();
        let rules = explain.get_arguments().find(|it| it.get_id() == "rules");
        assert_eq!(rules.unwrap().get_env(), None);
    }
}
