//! Mosquitto's connection log, which `log_dest topic` publishes under `$SYS/broker/log/`, one line
//! a message.
//!
//! Reads which connections of clients ended. A line contains text that a client chose: its id and
//! its user name. A client must never be able to forge the end of another one's connection:
//!
//! * Mosquitto truncates a line at some length, so that the client could choose the end of a long
//!   line. Long lines are ignored.
//! * An id may look like the rest of another line. So the text after the id is compared in full and
//!   from the end of the line, and the id is never read as shorter than it is. A line with two
//!   possible readings is ignored.
//! * Version 2.1 writes an address after the id, and in 2.0 the same text may be part of the id. So
//!   the version is read first. If it is unknown, such a line is ignored.
//! * Depending on the version, a refused client is named by the id that it requested, by
//!   `<unknown>` or by its address. Endings that are also used for refused clients are ignored.
//!
//! No client can publish under `$SYS/`: Mosquitto refuses it to all clients, and drops wills.

use std::net::IpAddr;

use statehouse_config::limits;

/// The name of this source in log lines.
pub(super) const NAME: &str = "mosquitto's connection log";

/// The topic of connection messages, which are notices.
const LOG: &str = "$SYS/broker/log/N";

/// The topic of the version, retained so that every subscription receives it: `mosquitto version
/// 2.0.11`.
pub(super) const VERSION: &str = "$SYS/broker/version";

pub(super) const FILTERS: &[&str] = &[VERSION, LOG];

/// The starts of lines about a connection that begins. The second one is about a handshake of TLS
/// that failed, because the client had closed the connection before Mosquitto accepted it.
/// `connection_messages` turns off both.
const CONNECTIONS: &[&str] = &["New ", "Client connection from "];

/// The texts after the id of a client whose connection ends, up to 2.0.
const ENDS: &[&str] = &[
    " disconnected.",
    " closed its connection.",
    " has exceeded timeout, disconnecting.",
    " been disconnected by administrative action.",
    " disconnected due to malformed packet.",
    " disconnected due to protocol error.",
    " disconnected due to oversize packet.",
    " disconnected due to oversize payload.",
    " disconnected due to out of memory.",
    " disconnected: Protocol error.",
    " disconnected: Connection reset by peer.",
    " disconnected: Connection timed out.",
    " disconnected: Broken pipe.",
    " disconnected: No route to host.",
];

/// The same since 2.1, after the id and ` [ADDRESS:PORT`. If a session is taken over, the line of
/// the new connection reports that.
const ENDS_WITH_ADDRESS: &[&str] = &[
    "] disconnected.",
    "] disconnected: connection closed by client.",
    "] disconnected: exceeded timeout.",
    "] disconnected: administrative action.",
    "] disconnected: malformed packet.",
    "] disconnected: protocol error.",
    "] disconnected: oversize packet.",
    "] disconnected: out of memory.",
    "] disconnected: Protocol error.",
    "] disconnected: Connection reset by peer.",
    "] disconnected: Connection timed out.",
    "] disconnected: Broken pipe.",
    "] disconnected: No route to host.",
];

/// The wording of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wording {
    #[default]
    Unknown,
    /// Up to 2.0.
    Plain,
    /// Since 2.1.
    WithAddress,
}

/// What a message of the broker says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Said<'a> {
    /// The broker publishes its log, so ends of connections can be read.
    pub(super) publishes_log: bool,
    /// The connection of this client has ended.
    pub(super) disconnected: Option<&'a str>,
}

/// Reads Mosquitto's log.
#[derive(Default)]
pub struct Mosquitto {
    wording: Wording,
}

impl Mosquitto {
    pub(super) fn read<'a>(&mut self, topic: &str, payload: &'a [u8]) -> Said<'a> {
        let mut said = Said::default();
        if payload.len() > limits::PRESENCE_LINE_BYTES_MAX {
            return said;
        }
        let Ok(line) = std::str::from_utf8(payload) else {
            return said;
        };
        match topic {
            VERSION => self.wording = wording(line),
            LOG => {
                let line = without_time(line);
                let is_connection = CONNECTIONS.iter().any(|it| line.starts_with(it));
                said.publishes_log = is_connection && self.wording != Wording::Unknown;
                if let Some(rest) = line.strip_prefix("New client connected from ") {
                    // An earlier connection of the client has ended: by a takeover, or without a
                    // log line.
                    said.disconnected = connected(rest);
                } else if let Some(rest) = line.strip_prefix("Client ") {
                    said.disconnected = disconnected(rest, self.wording);
                }
            }
            _ => {}
        }
        said
    }
}

/// The wording of a version such as `mosquitto version 2.0.11`.
fn wording(version: &str) -> Wording {
    let numbers = version.strip_prefix("mosquitto version ").and_then(|it| {
        let (major, rest) = it.split_once('.')?;
        let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    match numbers {
        None => Wording::Unknown,
        Some(numbers) if numbers < (2, 1) => Wording::Plain,
        Some(_) => Wording::WithAddress,
    }
}

/// Removes the time and the colon at the start of a line (`log_timestamp`). No message of Mosquitto
/// begins with a digit, so the text of a client is never read as a time.
fn without_time(line: &str) -> &str {
    if line.starts_with(|first: char| first.is_ascii_digit()) {
        line.split_once(": ").map_or("", |(_, message)| message)
    } else {
        line
    }
}

/// The id of a client that has connected, from `ADDRESS:PORT as ID (p5, c1, k60, u'USER').`. A
/// client without a user has no `, u'USER'`.
fn connected(rest: &str) -> Option<&str> {
    let (_, rest) = rest.split_once(" as ")?;
    let rest = rest.strip_suffix(").")?;
    let mut found = None;
    for (at, _) in rest.match_indices(" (p") {
        if let Some(user) = details(&rest[at + " (p".len()..]) {
            // A second match is in the id or in the user name, so the line is ambiguous.
            if found.is_some() {
                return None;
            }
            found = Some((&rest[..at], user));
        }
    }
    let (client, user) = found?;
    let is_a_user = |text: &str| (text.strip_prefix(", u'")).is_some_and(|it| it.ends_with('\''));
    ((user.is_empty() || is_a_user(user)) && is_named(client)).then_some(client)
}

/// The text after `5, c1, k60`.
fn details(text: &str) -> Option<&str> {
    let text = digits(text)?.strip_prefix(", c")?;
    let text = digits(text)?.strip_prefix(", k")?;
    digits(text)
}

/// The text after its leading digits; none if it begins with no digit.
fn digits(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches(|it: char| it.is_ascii_digit());
    (rest.len() < text.len()).then_some(rest)
}

/// The id of a client whose connection has ended, from the text after `Client `.
fn disconnected(rest: &str, wording: Wording) -> Option<&str> {
    let end_of = |ends: &[&str]| ends.iter().find_map(|end| rest.strip_suffix(end));
    let with_address = end_of(ENDS_WITH_ADDRESS).and_then(|rest| rest.rsplit_once(" ["));
    let client = match (wording, with_address) {
        (Wording::WithAddress, Some((client, address))) => {
            // A client that has sent no id yet is named by its address.
            let (host, _) = address.rsplit_once(':')?;
            (client != host).then_some(client)
        }
        (Wording::WithAddress, None) | (Wording::Unknown, Some(_)) => None,
        (Wording::Plain | Wording::Unknown, _) => end_of(ENDS),
    }?;
    is_client_id(client).then_some(client)
}

/// Whether a name is a client id. Where a connection ends, Mosquitto may name a client without an
/// id by its address. If a client chooses such an id, only its next connection ends its watches.
fn is_client_id(client: &str) -> bool {
    let host = client.split_once('%').map_or(client, |(host, _)| host);
    is_named(client) && host.parse::<IpAddr>().is_err()
}

/// Whether a name is none that Mosquitto gives to all clients without an id.
fn is_named(client: &str) -> bool {
    !client.is_empty() && client != "<unknown>"
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "mosquitto version 2.0.11";
    const NEW: &str = "mosquitto version 2.1.2";

    /// The clients that the lines of a broker with this version disconnect, each behind a hyphen.
    fn events(version: &str, lines: &[&str]) -> Vec<String> {
        let mut source = Mosquitto::default();
        source.read(VERSION, version.as_bytes());
        let clients = (lines.iter()).filter_map(|it| source.read(LOG, it.as_bytes()).disconnected);
        clients.map(|client| format!("-{client}")).collect()
    }

    /// Mosquitto 2.0.11 wrote these lines.
    #[test]
    fn connections_and_their_ends_are_read() {
        let seen = events(
            OLD,
            &[
                "1795288898: New connection from 127.0.0.1:47816 on port 18830.",
                "1795288898: New client connected from 127.0.0.1:47816 as plain (p5, c1, k60, u'joe').",
                "1795288899: Client plain disconnected.",
                "1795288899: New client connected from 127.0.0.1:46654 as a b (p2, c0, k1).",
                "1795288899: Client a b closed its connection.",
                "1795289713: Client ka has exceeded timeout, disconnecting.",
                "1795289705: Client vic been disconnected by administrative action.",
                "1795289714: Client tls-rst disconnected: Protocol error.",
                "1795288900: Client mal disconnected due to protocol error.",
            ],
        );
        assert_eq!(
            seen,
            [
                "-plain", "-plain", "-a b", "-a b", "-ka", "-vic", "-tls-rst", "-mal"
            ]
        );
    }

    /// Mosquitto 2.1 wrote these lines, as its users quote them.
    #[test]
    fn the_wording_of_2_1_is_read() {
        let lines = [
            "2026-05-11T15:32:54Z: New client connected from 192.168.0.161:57022 as ESP_EA5484 (p4, c1, k60).",
            "2026-05-11T15:37:23Z: Client ESP_EA5484 [192.168.0.161:52615] disconnected: exceeded timeout.",
            "1778656330: Client auto-965F [127.0.0.1:64552] disconnected.",
            "14:01:32: Client Leith [::1:49497] disconnected: connection closed by client.",
        ];
        assert_eq!(
            events(NEW, &lines),
            ["-ESP_EA5484", "-ESP_EA5484", "-auto-965F", "-Leith"]
        );
    }

    #[test]
    fn an_id_that_looks_like_a_line_is_read_in_full() {
        let seen = events(
            OLD,
            &[
                "1: Client victim disconnected. closed its connection.",
                "1: Client victim disconnected: Broken pipe. disconnected.",
                "1: Client victim [1.2.3.4:5] disconnected: exceeded timeout disconnected.",
                "1: Client victim [1.2.3.4:5] disconnected.",
                "1: Client x\n1: Client victim disconnected. disconnected.",
                "1: Client New client connected from 1.2.3.4:5 as victim (p5, c1, k1). disconnected.",
            ],
        );
        assert_eq!(
            seen,
            [
                "-victim disconnected.",
                "-victim disconnected: Broken pipe.",
                "-victim [1.2.3.4:5] disconnected: exceeded timeout",
                "-victim [1.2.3.4:5]",
                "-x\n1: Client victim disconnected.",
                "-New client connected from 1.2.3.4:5 as victim (p5, c1, k1).",
            ]
        );
        let seen = events(
            NEW,
            &[
                "1: Client victim [1.2.3.4:5] disconnected. [6.7.8.9:10] disconnected.",
                "1: Client victim disconnected. [6.7.8.9:10] disconnected: exceeded timeout.",
            ],
        );
        assert_eq!(
            seen,
            ["-victim [1.2.3.4:5] disconnected.", "-victim disconnected."]
        );
    }

    #[test]
    fn an_ambiguous_line_is_ignored() {
        let connected = [
            // The id or the user name contains a whole text that follows an id.
            "1: New client connected from 1.2.3.4:5 as victim (p5, c1, k60) (p5, c1, k60).",
            "1: New client connected from 1.2.3.4:5 as x (p5, c1, k60, u'x', (p5, c1, k60, u'root').",
            "1: New client connected from 1.2.3.4:5 as victim (p5, c1, k60, u'root') (p2, c1, k1).",
        ];
        assert_eq!(events(OLD, &connected), Vec::<String>::new());
        // The line is of 2.0 and a client with an unusual id, or of 2.1 and the victim.
        let ended = ["1: Client victim [1.2.3.4:5] disconnected."];
        assert_eq!(events("", &ended), Vec::<String>::new());
        assert_eq!(events("something else 2.0.1", &ended), Vec::<String>::new());
        // An ordinary line can only have the old wording.
        let ended = ["1: Client victim disconnected."];
        assert_eq!(events("", &ended), ["-victim"]);
        assert_eq!(events(NEW, &ended), Vec::<String>::new());
    }

    #[test]
    fn a_line_that_may_be_truncated_is_ignored() {
        let id = format!("victim{} disconnected.", "m".repeat(1000));
        let line = format!("1: Client {id}");
        // The id is so long that Mosquitto has truncated all of its own text.
        assert_eq!(events(OLD, &[&line]), Vec::<String>::new());
        let longest = limits::PRESENCE_LINE_BYTES_MAX - "1: Client  disconnected.".len();
        let line = format!("1: Client {} disconnected.", "m".repeat(longest));
        assert_eq!(events(OLD, &[&line]).len(), 1);
        let line = format!("1: Client {} disconnected.", "m".repeat(longest + 1));
        assert_eq!(events(OLD, &[&line]), Vec::<String>::new());
    }

    #[test]
    fn the_end_of_a_refused_connection_is_ignored() {
        let refused = [
            "1: Client <unknown> closed its connection.",
            "1: Client <unknown> disconnected, not authorised.",
            // Since 2.0.12 these lines have the requested id or the address.
            "1: Client victim disconnected, not authorised.",
            "1: Client 127.0.0.1 closed its connection.",
            "1: Client fe80::1%eth0 closed its connection.",
            "1: Bad socket read/write on client victim: Unknown error.",
        ];
        assert_eq!(events(OLD, &refused), Vec::<String>::new());
        let refused = [
            "1: Client victim [192.168.16.181:1] disconnected: not authorised.",
            "1: Client 10.42.0.1 [10.42.0.1:60414] disconnected: connection closed by client.",
            "1: Client gateway.local [gateway.local:1] disconnected: connection closed by client.",
        ];
        assert_eq!(events(NEW, &refused), Vec::<String>::new());
    }

    #[test]
    fn a_new_connection_of_an_id_like_an_address_is_read() {
        for version in [OLD, NEW] {
            let connected = [
                "1: New client connected from 127.0.0.1:5 as 10.0.0.5 (p5, c1, k60).",
                "1: New client connected from 127.0.0.1:5 as fe80::1%eth0 (p5, c1, k60, u'joe').",
                "1: New client connected from 127.0.0.1:5 as <unknown> (p5, c1, k60).",
            ];
            assert_eq!(events(version, &connected), ["-10.0.0.5", "-fe80::1%eth0"]);
        }
    }

    #[test]
    fn a_client_cannot_forge_a_time_in_a_line_without_one() {
        let lines = [
            // The client id is `x: Client victim disconnected`.
            "Outgoing messages are being dropped for client x: Client victim disconnected.",
            "Client plain disconnected.",
        ];
        assert_eq!(events(OLD, &lines), ["-plain"]);
    }

    #[test]
    fn other_topics_and_invalid_lines_are_ignored() {
        let mut source = Mosquitto::default();
        for (topic, line) in [
            ("$SYS/broker/log/E", &b"1: Client a disconnected."[..]),
            (LOG, b"1: Client \xff disconnected."),
            (LOG, b""),
            (LOG, b"1"),
            (LOG, b"1: Client  disconnected."),
            (LOG, b"1: Client a has been seen."),
        ] {
            let shown = line.escape_ascii();
            assert_eq!(source.read(topic, line), Said::default(), "{shown}");
        }
    }

    #[test]
    fn the_log_counts_as_published_once_the_version_is_known() {
        let connection = b"1: New connection from 127.0.0.1:47816 on port 18830.";
        let mut source = Mosquitto::default();
        let mut works = |topic: &str, line: &[u8]| source.read(topic, line).publishes_log;
        assert!(!works(LOG, connection));
        assert!(!works(VERSION, OLD.as_bytes()));
        assert!(!works(LOG, b"1: Client a disconnected."));
        assert!(works(LOG, connection));
    }

    /// With TLS, there is often no other line at the start.
    #[test]
    fn a_failed_handshake_shows_that_the_log_is_published() {
        let mut source = Mosquitto::default();
        let line = b"1: Client connection from 127.0.0.1 failed: error:0A000126:SSL routines::unexpected eof while reading.";
        for version in [None, Some(OLD), Some(NEW)] {
            if let Some(version) = version {
                source.read(VERSION, version.as_bytes());
            }
            let said = source.read(LOG, line);
            assert_eq!(said.publishes_log, version.is_some());
            assert_eq!(said.disconnected, None);
        }
    }

    #[test]
    fn the_version_determines_the_wording() {
        assert_eq!(wording("mosquitto version 1.6.9"), Wording::Plain);
        assert_eq!(wording("mosquitto version 2.0.22"), Wording::Plain);
        assert_eq!(wording("mosquitto version 2.1.0"), Wording::WithAddress);
        assert_eq!(wording("mosquitto version 2.1-rc1"), Wording::WithAddress);
        assert_eq!(wording("mosquitto version 3.0.0"), Wording::WithAddress);
        assert_eq!(wording("mosquitto version x"), Wording::Unknown);
    }
}
