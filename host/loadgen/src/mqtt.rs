//! The part of MQTT 5 that a client of the store needs, without a socket.
//!
//! The common parts of all requests are encoded once, so a request is mostly a copy. Answers and
//! notifications are acknowledged with the next bytes that are sent.

pub mod packet;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use statehouse_mqtt::PropertiesBuilder;

use self::packet::{
    MALFORMED, Scan, packet, properties, push_length, push_packet, push_text, text,
};
use super::protocol::{Broken, Protocol, Received, Role};
use super::work::{Catalogue, Reply, Request, Verb, write_digits};
use crate::limits;
use statehouse_core::clock::wall_ms;
use statehouse_core::request::{REQUEST_TOPIC, client_id_of, notification_topic};

/// The beginning of the notification of a SET. The value follows as a bulk string (the protocol,
/// section 8).
const NOTIFIED_SET: &[u8] = b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n";

/// The offset of the correlation data in the properties, after their identifier and length.
const CORRELATION_AT: usize = 3;

/// The correlation data are slot and number. They identify the request of an answer and make every
/// request unique.
const CORRELATION_BYTES: usize = 8;

/// The clock reading of a request. The milliseconds are overwritten.
const TIMESTAMP: &str = "000000000000000:00000:bench";

/// Digits of the milliseconds in `TIMESTAMP`.
const WALL_DIGITS: usize = 15;

/// Reason code "No matching subscribers" (MQTT 5 section 3.4.2.1).
const NO_SUBSCRIBERS: u8 = 0x10;

/// One client of the store.
pub struct Mqtt {
    catalogue: Arc<Catalogue>,
    id: String,
    login: Option<(String, String)>,
    role: Role,
    response_topic: String,
    /// Topic, packet id and properties: everything of a PUBLISH between its length and its payload.
    envelope: Vec<u8>,
    packet_id_at: usize,
    correlation_at: usize,
    wall_at: usize,
    wall_ms: u64,
    /// The beginnings of the payloads up to the key, one per verb.
    heads: [Vec<u8>; 4],
    /// The length and the line ends before a value.
    value_head: Vec<u8>,
    receive_max: u16,
}

impl Mqtt {
    /// Client `number` of a run. Each run needs its own `nonce`; otherwise it would take over the
    /// sessions of another run.
    #[must_use]
    pub fn new(catalogue: Arc<Catalogue>, nonce: u64, role: Role, number: usize) -> Self {
        let kind = match role {
            Role::Asks => "bench",
            Role::Watches => "bench-watch",
        };
        Self::with_id(catalogue, format!("{kind}-{nonce:016x}-{number}"), role)
    }

    fn with_id(catalogue: Arc<Catalogue>, id: String, role: Role) -> Self {
        let response_topic = format!("clients/{id}/bench");
        let properties = PropertiesBuilder::new()
            .correlation_data(&[0; CORRELATION_BYTES])
            .response_topic(&response_topic)
            .user("__protVer", "1.0")
            .user("__ts", TIMESTAMP)
            .finish()
            // This fails only for U+0000, wildcards and lengths above 65 535, which do not occur.
            .expect("short texts without wildcards");
        let mut envelope = Vec::new();
        push_text(&mut envelope, REQUEST_TOPIC.as_bytes());
        let packet_id_at = envelope.len();
        envelope.extend_from_slice(&[0, 0]);
        push_length(&mut envelope, properties.len());
        let correlation_at = envelope.len() + CORRELATION_AT;
        envelope.extend_from_slice(&properties);
        let head = |arguments: usize, verb: &str| {
            let (verb_bytes, key_bytes) = (verb.len(), catalogue.key_bytes());
            format!("*{arguments}\r\n${verb_bytes}\r\n{verb}\r\n${key_bytes}\r\n").into_bytes()
        };
        Self {
            heads: [
                head(2, "GET"),
                head(3, "SET"),
                head(2, "DEL"),
                head(2, "KEYNOTIFY"),
            ],
            value_head: format!("\r\n${}\r\n", catalogue.value_bytes()).into_bytes(),
            wall_at: envelope.len() - TIMESTAMP.len(),
            wall_ms: 0,
            catalogue,
            id,
            login: None,
            role,
            response_topic,
            envelope,
            packet_id_at,
            correlation_at,
            receive_max: u16::MAX,
        }
    }

    /// Adds a user name and a password (sections 3.1.3.5 and 3.1.3.6), each of at most 65 535
    /// bytes. The client id then begins with the user, so that rules can bind ids to users.
    #[must_use]
    pub fn with_login(self, login: Option<(String, String)>) -> Self {
        let id = client_id_of(login.as_ref().map(|(user, _)| &**user), &self.id);
        Self {
            login,
            ..Self::with_id(self.catalogue, id, self.role)
        }
    }

    fn connect(&self, out: &mut Vec<u8>) {
        let packet_bytes_max = self.catalogue.value_bytes() + limits::LOAD_ENVELOPE_BYTES;
        let mut body = vec![0, 4, b'M', b'Q', b'T', b'T', 5];
        // Clean Start, and no Session Expiry Interval, so the session ends with the connection
        // (section 3.1.2.11.2). With a login, also the flags of user name and password.
        body.push(if self.login.is_some() { 0xc2 } else { 2 });
        body.extend_from_slice(&limits::LOAD_KEEP_ALIVE_S.to_be_bytes());
        // Maximum Packet Size (section 3.1.2.11.4).
        body.extend_from_slice(&[5, 0x27]);
        let packet_bytes_max = u32::try_from(packet_bytes_max).unwrap_or(u32::MAX);
        body.extend_from_slice(&packet_bytes_max.to_be_bytes());
        push_text(&mut body, self.id.as_bytes());
        if let Some((user, password)) = &self.login {
            push_text(&mut body, user.as_bytes());
            push_text(&mut body, password.as_bytes());
        }
        push_packet(out, 0x10, &body);
    }

    fn subscribe(&self, out: &mut Vec<u8>) {
        let mut body = vec![0, 1, 0];
        push_text(&mut body, self.response_topic.as_bytes());
        body.push(1);
        if self.role == Role::Watches {
            // The store's own broker delivers notifications without a subscription, a foreign one
            // does not.
            let filter = notification_topic(&self.id, b"") + "#";
            push_text(&mut body, filter.as_bytes());
            body.push(1);
        }
        push_packet(out, 0x82, &body);
    }

    /// Handles a CONNACK (section 3.2).
    fn connected(&mut self, body: &[u8]) -> Result<(), Broken> {
        let [_, reason, rest @ ..] = body else {
            return Err(MALFORMED);
        };
        if *reason != 0 {
            return Err(Broken::Refused(refusal(*reason)));
        }
        let properties = properties(rest)?.0;
        let mut packet_bytes_max = u32::MAX;
        for property in Scan(properties) {
            match property? {
                (0x21, [high, low]) => self.receive_max = u16::from_be_bytes([*high, *low]),
                (0x27, &[a, b, c, d]) => packet_bytes_max = u32::from_be_bytes([a, b, c, d]),
                _ => {}
            }
        }
        let mut longest = Vec::new();
        let request = Request {
            verb: Verb::Set,
            key: 0,
        };
        self.ask(0, 0, request, &mut longest);
        if longest.len() > packet_bytes_max as usize {
            return Err(Broken::Refused(format!(
                "values of {} bytes need packets of {}, and the server takes {packet_bytes_max}",
                self.catalogue.value_bytes(),
                longest.len()
            )));
        }
        Ok(())
    }

    /// Handles a PUBLISH: an answer or a notification.
    fn message<'a>(
        &self,
        first: u8,
        body: &'a [u8],
        out: &mut Vec<u8>,
    ) -> Result<Received<'a>, Broken> {
        let (topic, mut rest) = text(body)?;
        if first & 6 != 0 {
            let (id, behind) = rest.split_first_chunk::<2>().ok_or(MALFORMED)?;
            out.extend_from_slice(&[0x40, 2, id[0], id[1]]);
            rest = behind;
        }
        let (properties, payload) = properties(rest)?;
        if topic != self.response_topic.as_bytes() {
            let value = payload.strip_prefix(NOTIFIED_SET).and_then(bulk);
            return Ok(Received::Notification(value));
        }
        let (mut correlation, mut status) = (None, None);
        for property in Scan(properties) {
            match property? {
                (0x09, data) => correlation = <[u8; CORRELATION_BYTES]>::try_from(data).ok(),
                (0x26, pair) => {
                    let (name, rest) = text(pair)?;
                    if name == b"__stat" {
                        status = Some(text(rest)?.0);
                    }
                }
                _ => {}
            }
        }
        let Some([a, b, number @ ..]) = correlation else {
            return Ok(Received::Unknown);
        };
        let [c, d, e, f, g, h] = number;
        let reply = match status {
            Some(b"200") => reply(payload),
            _ => Reply::Strange,
        };
        Ok(Received::Answer {
            slot: u16::from_be_bytes([a, b]),
            number: u64::from_be_bytes([0, 0, c, d, e, f, g, h]),
            reply,
        })
    }
}

impl Protocol for Mqtt {
    const ACKNOWLEDGES: bool = true;

    fn hello(&mut self, out: &mut Vec<u8>) {
        // A client may send packets before it receives the CONNACK (section 3.1.4).
        self.connect(out);
        self.subscribe(out);
    }

    fn in_flight_max(&self) -> u16 {
        // Packet ids begin at 1.
        self.receive_max.min(u16::MAX - 1)
    }

    fn ask(&mut self, slot: u16, number: u64, request: Request, out: &mut Vec<u8>) {
        let wall_ms = wall_ms();
        if self.wall_ms != wall_ms {
            self.wall_ms = wall_ms;
            write_digits(&mut self.envelope[self.wall_at..][..WALL_DIGITS], wall_ms);
        }
        let packet_id = (slot + 1).to_be_bytes();
        self.envelope[self.packet_id_at..][..2].copy_from_slice(&packet_id);
        let correlation = u64::from(slot) << 48 | number & ((1 << 48) - 1);
        self.envelope[self.correlation_at..][..CORRELATION_BYTES]
            .copy_from_slice(&correlation.to_be_bytes());
        let (head, value) = match request.verb {
            Verb::Get => (&self.heads[0], None),
            Verb::Set => (&self.heads[1], Some(self.catalogue.value(request.key))),
            Verb::Del => (&self.heads[2], None),
            Verb::Watch => (&self.heads[3], None),
        };
        let value_bytes = value.map_or(0, |value| self.value_head.len() + value.len());
        let payload_bytes = head.len() + self.catalogue.key_bytes() + value_bytes + 2;
        out.push(0x32);
        push_length(out, self.envelope.len() + payload_bytes);
        out.extend_from_slice(&self.envelope);
        out.extend_from_slice(head);
        self.catalogue.push_key(request.key, out);
        if let Some(value) = value {
            out.extend_from_slice(&self.value_head);
            out.extend_from_slice(value);
        }
        out.extend_from_slice(b"\r\n");
    }

    fn read(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        mut receive: impl FnMut(Received<'_>),
    ) -> Result<usize, Broken> {
        let mut done = 0;
        while let Some((first, at, end)) = packet(&bytes[done..])? {
            let body = &bytes[done + at..done + end];
            done += end;
            match first >> 4 {
                2 => self.connected(body)?,
                3 => receive(self.message(first, body, out)?),
                4 => {
                    let [high, low, rest @ ..] = body else {
                        return Err(MALFORMED);
                    };
                    let slot = u16::from_be_bytes([*high, *low])
                        .checked_sub(1)
                        .ok_or(MALFORMED)?;
                    let refused = match rest.first().copied().unwrap_or(0) {
                        NO_SUBSCRIBERS => Some("no store is subscribed to requests".to_owned()),
                        reason if reason >= 0x80 => Some(format!("PUBACK {reason:#04x}")),
                        _ => None,
                    };
                    receive(Received::Acknowledged { slot, refused });
                }
                9 => {
                    let (_, reasons) = properties(body.get(2..).ok_or(MALFORMED)?)?;
                    if let Some(reason) = reasons.iter().find(|reason| **reason >= 0x80) {
                        return Err(Broken::Refused(format!("SUBACK {reason:#04x}")));
                    }
                    receive(Received::Ready);
                }
                13 => {}
                14 => {
                    let reason = body.first().copied().unwrap_or(0);
                    return Err(Broken::Ended(format!("DISCONNECT {reason:#04x}")));
                }
                _ => return Err(MALFORMED),
            }
        }
        Ok(done)
    }

    fn ping(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[0xC0, 0]);
    }

    fn bye(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[0xE0, 0]);
    }
}

/// The reason of a CONNACK (MQTT 5, section 3.2.2.2).
fn refusal(reason: u8) -> String {
    match reason {
        0x86 => "wrong user name or password".to_owned(),
        0x87 => "this client is not authorized to connect".to_owned(),
        0x9F => "too many logins failed; try again in a minute".to_owned(),
        other => format!("CONNACK {other:#04x}"),
    }
}

/// Decodes the payload of an answer (the protocol, section 4).
fn reply(payload: &[u8]) -> Reply<'_> {
    match payload {
        b"+OK\r\n" | b":1\r\n" => Reply::Done,
        b"$-1\r\n" | b":0\r\n" => Reply::Nothing,
        _ => match payload.strip_prefix(b"-ERR ") {
            Some(text) => Reply::Refused(text.strip_suffix(b"\r\n").unwrap_or(text)),
            None => bulk(payload).map_or(Reply::Strange, Reply::Value),
        },
    }
}

/// The content of a bulk string, if the payload is exactly one complete bulk string.
fn bulk(payload: &[u8]) -> Option<&[u8]> {
    let rest = payload.strip_prefix(b"$")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let length = std::str::from_utf8(&rest[..digits])
        .ok()?
        .parse::<usize>()
        .ok()?;
    let value = rest[digits..]
        .strip_prefix(b"\r\n")?
        .strip_suffix(b"\r\n")?;
    (value.len() == length).then_some(value)
}
