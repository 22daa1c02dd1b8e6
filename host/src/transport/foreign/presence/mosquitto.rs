//! Mosquitto's connection log, which `log_dest topic` publishes under `$SYS/broker/log/`, one line a message.
//!
//! What enters: lines. What leaves: signs of clients whose connections ended. A line holds what a client wrote, its id and
//! its user name, and only what no client could have written there makes a sign of it:
//!
//! * A line is cut at some length, and then its end is what the client wanted: long ones are not read.
//! * An id may look like the rest of another line. What follows it is compared whole and from the end of the line, so
//!   that the id is never taken to be shorter than it is; a line that can be read in two ways is not read at all.
//! * 2.1 puts an address behind the id, which in 2.0 may be part of it. So the version is asked for, and where it is not
//!   told, such a line is not read.
//! * Whoever is refused is named by the id that he asked for, before or after 2.1 as `<unknown>` or by his address:
//!   words that are used for such an end too are no sign.
//!
//! Nobody can publish under `$SYS/` himself: Mosquitto refuses it to all clients, and drops wills.

use std::net::IpAddr;

use super::Sign;
use crate::limits;

/// Its name in log lines.
pub(super) const NAME: &str = "mosquitto's connection log";

/// Connection messages are notices.
const LOG: &str = "$SYS/broker/log/N";

/// Retained, so that it comes with every subscription: `mosquitto version 2.0.11`.
pub(super) const VERSION: &str = "$SYS/broker/version";

/// The topics to subscribe to.
pub(super) const FILTERS: &[&str] = &[VERSION, LOG];

/// What follows the id of a client whose connection ends, up to 2.0.
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

/// The same since 2.1, behind the id and ` [ADDRESS:PORT`. A taken session is told of by the line that its new
/// connection makes.
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

/// How lines are worded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wording {
    /// Nobody has told the version.
    #[default]
    Unknown,
    /// Up to 2.0.
    Plain,
    /// Since 2.1.
    WithAddress,
}

/// The source.
#[derive(Default)]
pub struct Mosquitto {
    wording: Wording,
}

impl Mosquitto {
    /// A message on one of the topics or on another one. It calls `sign` for all that it says, in order.
    pub(super) fn read(&mut self, topic: &str, payload: &[u8], sign: &mut dyn FnMut(Sign<'_>)) {
        if payload.len() > limits::PRESENCE_LINE_BYTES_MAX {
            return;
        }
        let Ok(line) = std::str::from_utf8(payload) else {
            return;
        };
        match topic {
            VERSION => self.wording = wording(line),
            LOG => {
                let line = without_time(line);
                if line.starts_with("New ") && self.wording != Wording::Unknown {
                    sign(Sign::Works);
                }
                if let Some(rest) = line.strip_prefix("New client connected from ") {
                    if let Some(client) = came(rest) {
                        // An earlier connection of it has ended: taken over, or its end was not logged.
                        sign(Sign::Gone(client));
                    }
                } else if let Some(rest) = line.strip_prefix("Client ")
                    && let Some(client) = gone(rest, self.wording)
                {
                    sign(Sign::Gone(client));
                }
            }
            _ => {}
        }
    }
}

/// `mosquitto version 2.0.11`
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

/// A line may begin with a time and a colon (`log_timestamp`). No message of Mosquitto's begins with a digit, so what
/// a client wrote is never taken for a time.
fn without_time(line: &str) -> &str {
    if line.starts_with(|first: char| first.is_ascii_digit()) {
        line.split_once(": ").map_or("", |(_, message)| message)
    } else {
        line
    }
}

/// `ADDRESS:PORT as ID (p5, c1, k60, u'USER').`, the user only where there is one.
fn came(rest: &str) -> Option<&str> {
    let (_, rest) = rest.split_once(" as ")?;
    let rest = rest.strip_suffix(").")?;
    let mut found = None;
    for (at, _) in rest.match_indices(" (p") {
        if let Some(user) = details(&rest[at + " (p".len()..]) {
            // In an id or in a user name: which of them is the real one?
            if found.is_some() {
                return None;
            }
            found = Some((&rest[..at], user));
        }
    }
    let (client, user) = found?;
    let is_a_user = |text: &str| (text.strip_prefix(", u'")).is_some_and(|it| it.ends_with('\''));
    ((user.is_empty() || is_a_user(user)) && is_an_id(client)).then_some(client)
}

/// What follows `5, c1, k60`.
fn details(text: &str) -> Option<&str> {
    let text = digits(text)?.strip_prefix(", c")?;
    let text = digits(text)?.strip_prefix(", k")?;
    digits(text)
}

/// What follows the digits that a text begins with.
fn digits(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches(|it: char| it.is_ascii_digit());
    (rest.len() < text.len()).then_some(rest)
}

/// The id of a client whose connection has ended, from what follows `Client `.
fn gone(rest: &str, wording: Wording) -> Option<&str> {
    let end_of = |ends: &[&str]| ends.iter().find_map(|end| rest.strip_suffix(end));
    let with_address = end_of(ENDS_WITH_ADDRESS).and_then(|rest| rest.rsplit_once(" ["));
    let client = match (wording, with_address) {
        (Wording::WithAddress, Some((client, address))) => {
            // Who has told no id yet is named by his address.
            let (host, _) = address.rsplit_once(':')?;
            (client != host).then_some(client)
        }
        (Wording::WithAddress, None) | (Wording::Unknown, Some(_)) => None,
        (Wording::Plain | Wording::Unknown, _) => end_of(ENDS),
    }?;
    is_an_id(client).then_some(client)
}

/// Whether a name is a client's own, and not what Mosquitto calls those that have told none. Whoever chooses such an
/// id has nobody listen for his end.
fn is_an_id(client: &str) -> bool {
    let host = client.split_once('%').map_or(client, |(host, _)| host);
    !client.is_empty() && client != "<unknown>" && host.parse::<IpAddr>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "mosquitto version 2.0.11";
    const NEW: &str = "mosquitto version 2.1.2";

    /// What the lines say to a source that was told of this version.
    fn signs(version: &str, lines: &[&str]) -> Vec<String> {
        let mut source = Mosquitto::default();
        let mut signs = Vec::new();
        let mut note = |sign: Sign<'_>| match sign {
            Sign::Works => {}
            Sign::Gone(client) => signs.push(format!("-{client}")),
        };
        source.read(VERSION, version.as_bytes(), &mut note);
        for line in lines {
            source.read(LOG, line.as_bytes(), &mut note);
        }
        signs
    }

    /// These were written by Mosquitto 2.0.11.
    #[test]
    fn the_life_of_a_connection_is_read() {
        let seen = signs(
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

    /// These were written by Mosquitto 2.1, as its users quote it.
    #[test]
    fn the_wording_of_2_1_is_read() {
        let lines = [
            "2026-05-11T15:32:54Z: New client connected from 192.168.0.161:57022 as ESP_EA5484 (p4, c1, k60).",
            "2026-05-11T15:37:23Z: Client ESP_EA5484 [192.168.0.161:52615] disconnected: exceeded timeout.",
            "1778656330: Client auto-965F [127.0.0.1:64552] disconnected.",
            "14:01:32: Client Leith [::1:49497] disconnected: connection closed by client.",
        ];
        assert_eq!(
            signs(NEW, &lines),
            ["-ESP_EA5484", "-ESP_EA5484", "-auto-965F", "-Leith"]
        );
    }

    #[test]
    fn an_id_that_looks_like_a_line_is_read_as_the_id_that_it_is() {
        let seen = signs(
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
        let seen = signs(
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
    fn what_can_be_read_in_two_ways_is_not_read() {
        let connected = [
            // An id, or a user name, with all that follows an id.
            "1: New client connected from 1.2.3.4:5 as victim (p5, c1, k60) (p5, c1, k60).",
            "1: New client connected from 1.2.3.4:5 as x (p5, c1, k60, u'x', (p5, c1, k60, u'root').",
            "1: New client connected from 1.2.3.4:5 as victim (p5, c1, k60, u'root') (p2, c1, k1).",
        ];
        assert_eq!(signs(OLD, &connected), Vec::<String>::new());
        // 2.0 of a client with a strange id, or 2.1 of the victim.
        let ended = ["1: Client victim [1.2.3.4:5] disconnected."];
        assert_eq!(signs("", &ended), Vec::<String>::new());
        assert_eq!(signs("something else 2.0.1", &ended), Vec::<String>::new());
        // An ordinary one can only be the old wording.
        let ended = ["1: Client victim disconnected."];
        assert_eq!(signs("", &ended), ["-victim"]);
        assert_eq!(signs(NEW, &ended), Vec::<String>::new());
    }

    #[test]
    fn a_line_that_may_have_been_cut_is_not_read() {
        let id = format!("victim{} disconnected.", "m".repeat(1000));
        let line = format!("1: Client {id}");
        // Where the id was so long that Mosquitto left nothing of its own words.
        assert_eq!(signs(OLD, &[&line]), Vec::<String>::new());
        let longest = limits::PRESENCE_LINE_BYTES_MAX - "1: Client  disconnected.".len();
        let line = format!("1: Client {} disconnected.", "m".repeat(longest));
        assert_eq!(signs(OLD, &[&line]).len(), 1);
        let line = format!("1: Client {} disconnected.", "m".repeat(longest + 1));
        assert_eq!(signs(OLD, &[&line]), Vec::<String>::new());
    }

    #[test]
    fn who_was_never_connected_is_no_sign() {
        let refused = [
            "1: Client <unknown> closed its connection.",
            "1: Client <unknown> disconnected, not authorised.",
            // Since 2.0.12 by the id that was asked for, or by the address.
            "1: Client victim disconnected, not authorised.",
            "1: Client 127.0.0.1 closed its connection.",
            "1: Client fe80::1%eth0 closed its connection.",
            "1: Bad socket read/write on client victim: Unknown error.",
        ];
        assert_eq!(signs(OLD, &refused), Vec::<String>::new());
        let refused = [
            "1: Client victim [192.168.16.181:1] disconnected: not authorised.",
            "1: Client 10.42.0.1 [10.42.0.1:60414] disconnected: connection closed by client.",
            "1: Client gateway.local [gateway.local:1] disconnected: connection closed by client.",
        ];
        assert_eq!(signs(NEW, &refused), Vec::<String>::new());
    }

    #[test]
    fn without_a_time_a_client_cannot_make_one() {
        let lines = [
            // An id of `x: Client victim disconnected`.
            "Outgoing messages are being dropped for client x: Client victim disconnected.",
            "Client plain disconnected.",
        ];
        assert_eq!(signs(OLD, &lines), ["-plain"]);
    }

    #[test]
    fn other_topics_and_other_bytes_say_nothing() {
        let mut source = Mosquitto::default();
        let mut none = |sign: Sign<'_>| panic!("{sign:?}");
        source.read("$SYS/broker/log/E", b"1: Client a disconnected.", &mut none);
        source.read(LOG, b"1: Client \xff disconnected.", &mut none);
        source.read(LOG, b"", &mut none);
        source.read(LOG, b"1", &mut none);
        source.read(LOG, b"1: Client  disconnected.", &mut none);
        source.read(LOG, b"1: Client a has been seen.", &mut none);
    }

    #[test]
    fn it_works_once_connections_and_the_version_are_told() {
        let connection = b"1: New connection from 127.0.0.1:47816 on port 18830.";
        let mut source = Mosquitto::default();
        let mut works = |topic, line: &[u8]| {
            let mut works = false;
            source.read(topic, line, &mut |sign| works |= sign == Sign::Works);
            works
        };
        assert!(!works(LOG, connection));
        assert!(!works(VERSION, OLD.as_bytes()));
        assert!(!works(LOG, b"1: Client a disconnected."));
        assert!(works(LOG, connection));
    }

    #[test]
    fn versions_are_told_apart() {
        assert_eq!(wording("mosquitto version 1.6.9"), Wording::Plain);
        assert_eq!(wording("mosquitto version 2.0.22"), Wording::Plain);
        assert_eq!(wording("mosquitto version 2.1.0"), Wording::WithAddress);
        assert_eq!(wording("mosquitto version 2.1-rc1"), Wording::WithAddress);
        assert_eq!(wording("mosquitto version 3.0.0"), Wording::WithAddress);
        assert_eq!(wording("mosquitto version x"), Wording::Unknown);
    }
}
