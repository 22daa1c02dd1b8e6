//! `statehouse usage`: shows how much of a running store is used, and by which clients.

use hyper::Method;

use super::output::{Exit, Failure, emit, emit_json};
use super::store::{Store, unexpected};
use super::table::{self, cell, cell_or_dash};
use crate::admin::Usage;

/// Show how full a running store is, and which clients own the most keys and bytes
///
/// A key belongs to the client that wrote it last. Bytes are those of keys and values plus 128 for
/// each entry, as max_bytes and max_client_bytes count them. The total also includes the names of
/// the owners and the hidden keys of policies. The room on the disk is that for records until
/// writes are refused; the next snapshot makes room again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse usage
  statehouse usage --clients 500 --json")]
pub(super) struct Args {
    /// How many clients to list, those that own the most bytes first; at most 2000
    #[arg(long, value_name = "N", default_value_t = 20)]
    clients: usize,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    let path = format!("/v1/usage?clients={}", args.clients);
    let answer = args.store.ask(Method::GET, &path).await;
    let answer = answer.map_err(Failure::of_question)?;
    if args.store.json {
        emit_json(&answer)?;
    } else {
        let usage = serde_json::from_value(answer).map_err(unexpected)?;
        emit(text(&usage).as_bytes())?;
    }
    Ok(Exit::Done)
}

fn text(it: &Usage) -> String {
    let header = ["", "used", "of", "one client may own"];
    let sums = [
        [
            "keys".to_owned(),
            it.keys.used.to_string(),
            it.keys.max.to_string(),
            it.max_client_keys.to_string(),
        ],
        [
            "bytes".to_owned(),
            it.bytes.used.to_string(),
            it.bytes.max.to_string(),
            it.max_client_bytes.to_string(),
        ],
    ];
    let mut text = table::of(header, sums, 1);
    if let Some(disk) = &it.disk {
        let free = disk.free;
        text.push_str(&match disk.full {
            true if disk.no_free_inodes => "the file system has no free inodes: writes are refused. Remove files from it\n".to_owned(),
            true => format!("the disk is full, with {free} bytes free: writes are refused. Free disk space, or remove keys\n"),
            false => format!("disk: {free} bytes free, room for {} bytes of records\n", disk.room),
        });
    }
    if it.clients.is_empty() {
        text.push_str(&format!("\n{}\n", owners(it.owners)));
        return text;
    }
    let rows = it.clients.iter().map(|it| {
        let connected = match it.connected {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        [
            match &*it.client {
                "" => "(not named)".to_owned(),
                client => cell(client),
            },
            cell_or_dash(it.user.as_deref()),
            connected.to_owned(),
            it.keys.to_string(),
            it.bytes.to_string(),
        ]
    });
    let header = ["client", "user", "connected", "keys", "bytes"];
    text.push('\n');
    text.push_str(&table::of(header, rows, 3));
    let others = it.owners.saturating_sub(it.clients.len() as u64);
    if others > 0 {
        text.push_str(&format!("and {others} more, who own less\n"));
    }
    text
}

fn owners(count: u64) -> String {
    match count {
        0 => "no client owns a key".to_owned(),
        1 => "1 client owns keys".to_owned(),
        _ => format!("{count} clients own keys"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{DiskRoom, Owner, Taken};

    #[test]
    fn totals_precede_the_largest_owners() {
        let owner = |client: &str, user: Option<&str>, keys| Owner {
            client: client.into(),
            keys,
            bytes: 200 * keys,
            connected: user.map(|_| true),
            user: user.map(Into::into),
        };
        let mut usage = Usage {
            disk: None,
            keys: Taken { used: 13, max: 100 },
            bytes: Taken {
                used: 2_700,
                max: 40_000,
            },
            max_client_keys: 75,
            max_client_bytes: 30_000,
            owners: 4,
            clients: vec![owner("press\n4", Some("operator"), 10), owner("", None, 2)],
        };
        let sums = "       used     of  one client may own
keys     13    100                  75
bytes  2700  40000               30000
";
        let clients = "
client       user      connected  keys  bytes
press\\n4     operator  yes          10   2000
(not named)  -         -             2    400
and 2 more, who own less
";
        assert_eq!(text(&usage), format!("{sums}{clients}"));
        usage.clients = vec![owner(&"\\".repeat(65_535), None, 1)];
        let longest = text(&usage).lines().map(|line| line.chars().count()).max();
        assert!(longest < Some(120), "{longest:?}");
        usage.clients.clear();
        assert_eq!(text(&usage), format!("{sums}\n4 clients own keys\n"));
        for (full, line) in [
            (
                false,
                "disk: 500 bytes free, room for 90 bytes of records\n",
            ),
            (
                true,
                "the disk is full, with 500 bytes free: writes are refused. Free disk space, or remove keys\n",
            ),
        ] {
            let (free, room, no_free_inodes) = (500, 90, false);
            usage.disk = Some(DiskRoom {
                free,
                no_free_inodes,
                room,
                full,
            });
            assert_eq!(text(&usage), format!("{sums}{line}\n4 clients own keys\n"));
        }
        if let Some(disk) = &mut usage.disk {
            disk.no_free_inodes = true;
        }
        assert!(text(&usage).contains("no free inodes"));
    }
}
