//! `statehouse clients`: lists the clients of a running store, and disconnects them.

use hyper::Method;
use statehouse_core::clock::wall_ms;

use super::data::count;
use super::entries::duration;
use super::output::{Exit, Failure, emit, emit_json, notice, printable};
use super::store::{Store, unexpected};
use super::table::{self, cell, cell_or_dash};
use crate::admin::Clients;
use statehouse_config::percent;

/// Show who is connected to a running store, and what each client has open
///
/// Connected clients come first, those with the most queued bytes before the others. A queue that
/// grows belongs to a client that reads too slowly, or to a session without a connection.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse clients
  statehouse clients --limit 2000 --json | jq '.clients[] | select(.watches > 100)'
  statehouse clients kick press-4")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// How many clients to list; at most 2000
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,

    #[command(flatten)]
    store: Store,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// End the connection of a client, which may connect again
    ///
    /// The client receives DISCONNECT with reason 0x98 (administrative action), if it uses MQTT 5.
    /// Its session stays.
    /// Remove the user, or deny the connection by a rule, to keep the client away. Exit code 1 if
    /// the client is not connected.
    Kick {
        /// The client id
        client: String,

        #[command(flatten)]
        store: Store,
    },
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    if let Some(Command::Kick { client, store }) = &args.command {
        let path = format!("/v1/clients/{}", percent::encode(client.as_bytes()));
        let answer = store.ask(Method::DELETE, &path).await?;
        match store.json {
            true => _ = emit_json(&answer)?,
            false => notice(&format!(
                "the connection of {} is ended",
                printable(client.as_bytes())
            )),
        }
        return Ok(Exit::Done);
    }
    let path = format!("/v1/clients?clients={}", args.limit);
    let answer = args.store.ask(Method::GET, &path).await;
    let answer = answer.map_err(Failure::of_question)?;
    if args.store.json {
        emit_json(&answer)?;
    } else {
        let clients = serde_json::from_value(answer).map_err(unexpected)?;
        emit(text(&clients).as_bytes())?;
    }
    Ok(Exit::Done)
}

fn text(it: &Clients) -> String {
    // The clock of this machine may differ from that of the store's.
    let now_ms = it.time_ms.unwrap_or_else(wall_ms);
    let header = [
        "client",
        "user",
        "address",
        "mqtt",
        "connected",
        "subs",
        "watches",
        "locks",
        "queued",
        "bytes",
        "in flight",
    ];
    let rows = it.clients.iter().map(|it| {
        let since = it.since_ms.map(|since_ms| now_ms.saturating_sub(since_ms));
        [
            cell(&it.client),
            cell_or_dash(it.user.as_deref()),
            it.address.map_or("-".to_owned(), |it| it.to_string()),
            it.mqtt.clone().unwrap_or_else(|| "-".to_owned()),
            since.map_or("no".to_owned(), |ms| {
                duration(std::time::Duration::from_millis(ms))
            }),
            it.subscriptions.to_string(),
            it.watches.to_string(),
            it.locks.to_string(),
            it.queued.to_string(),
            it.queued_bytes.to_string(),
            it.in_flight.to_string(),
        ]
    });
    let mut text = match it.clients.is_empty() {
        true => String::new(),
        false => table::of(header, rows, 5),
    };
    let others = (it.connected + it.disconnected).saturating_sub(it.clients.len() as u64);
    let more = match others {
        0 => String::new(),
        _ => format!("; {others} not shown"),
    };
    text.push_str(&format!(
        "{} connected, {} without a connection{more}\n",
        it.connected,
        count(it.disconnected, "session")
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_a_table() {
        let clients = serde_json::json!({
            "connected": 1,
            "disconnected": 3,
            "time_ms": 65_000,
            "clients": [
                { "client": "press\n4", "user": "anna", "address": "10.0.0.7", "mqtt": "3.1.1",
                  "since_ms": 1_000, "subscriptions": 2, "watches": 3, "locks": 2, "queued": 1, "queued_bytes": 150, "in_flight": 1 },
                { "client": "old", "user": null, "address": null, "since_ms": null,
                  "subscriptions": 0, "watches": 0, "queued": 0, "queued_bytes": 0, "in_flight": 0 },
            ],
        });
        let clients = serde_json::from_value(clients).unwrap();
        let expected = "\
client    user  address   mqtt   connected  subs  watches  locks  queued  bytes  in flight
press\\n4  anna  10.0.0.7  3.1.1  64s           2        3      2       1    150          1
old       -     -         -      no            0        0      0       0      0          0
1 connected, 3 sessions without a connection; 2 not shown
";
        assert_eq!(text(&clients), expected);
    }
}
