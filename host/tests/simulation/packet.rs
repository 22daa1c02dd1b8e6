//! The packets of a client, encoded and decoded without code of the broker.

/// The protocol level of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// MQTT 3.1.1.
    Four = 4,
    /// MQTT 5.
    Five,
}

/// A packet from the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    Connack { present: bool, reason: u8 },
    Publish(Publish),
    Ack { kind: Ack, id: u16, reason: u8 },
    Suback { id: u16, reasons: Vec<u8> },
    Pingresp,
    Disconnect { reason: u8 },
}

/// The four acknowledgements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ack {
    Puback = 4,
    Pubrec = 5,
    Pubrel = 6,
    Pubcomp = 7,
}

/// A PUBLISH of either side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Publish {
    pub(crate) topic: String,
    pub(crate) payload: Vec<u8>,
    pub(crate) qos: u8,
    pub(crate) retain: bool,
    pub(crate) dup: bool,
    pub(crate) id: u16,
    pub(crate) response_topic: Option<String>,
    pub(crate) correlation: Option<Vec<u8>>,
    pub(crate) user: Vec<(String, String)>,
}

impl Publish {
    /// The first user property of this name.
    pub(crate) fn user(&self, name: &str) -> Option<&str> {
        let mut user = self.user.iter();
        user.find_map(|(it, value)| (it == name).then_some(&**value))
    }
}

/// A will: topic, payload, QoS 2, delay in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Will {
    pub(crate) topic: String,
    pub(crate) payload: Vec<u8>,
    pub(crate) delay_s: u32,
}

/// What a CONNECT says.
#[derive(Clone, Debug)]
pub(crate) struct Connect {
    pub(crate) level: Level,
    pub(crate) client: String,
    pub(crate) clean_start: bool,
    pub(crate) expiry_s: u32,
    pub(crate) receive_max: u16,
    pub(crate) will: Option<Will>,
}

fn text(out: &mut Vec<u8>, text: &[u8]) {
    let len = u16::try_from(text.len()).expect("texts are short");
    out.extend(len.to_be_bytes());
    out.extend(text);
}

fn varint(out: &mut Vec<u8>, mut number: usize) {
    loop {
        let low = (number % 128) as u8;
        number /= 128;
        out.push(if number > 0 { low | 0x80 } else { low });
        if number == 0 {
            return;
        }
    }
}

fn packet(first: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![first];
    varint(&mut out, body.len());
    out.extend(body);
    out
}

pub(crate) fn connect(it: &Connect) -> Vec<u8> {
    let mut body = Vec::new();
    text(&mut body, b"MQTT");
    let will = if it.will.is_some() { 0x14 } else { 0 };
    let flags = u8::from(it.clean_start) << 1 | will;
    body.extend([it.level as u8, flags, 0, 0]);
    if it.level == Level::Five {
        let mut properties = vec![0x11];
        properties.extend(it.expiry_s.to_be_bytes());
        properties.push(0x21);
        properties.extend(it.receive_max.to_be_bytes());
        varint(&mut body, properties.len());
        body.extend(properties);
    }
    text(&mut body, it.client.as_bytes());
    if let Some(will) = &it.will {
        if it.level == Level::Five {
            varint(&mut body, 5);
            body.push(0x18);
            body.extend(will.delay_s.to_be_bytes());
        }
        text(&mut body, will.topic.as_bytes());
        text(&mut body, &will.payload);
    }
    packet(0x10, &body)
}

/// At level four the properties are lost.
pub(crate) fn publish(level: Level, it: &Publish) -> Vec<u8> {
    let mut body = Vec::new();
    text(&mut body, it.topic.as_bytes());
    if it.qos > 0 {
        body.extend(it.id.to_be_bytes());
    }
    let mut properties = Vec::new();
    if let Some(topic) = &it.response_topic {
        properties.push(0x08);
        text(&mut properties, topic.as_bytes());
    }
    if let Some(data) = &it.correlation {
        properties.push(0x09);
        text(&mut properties, data);
    }
    for (name, value) in &it.user {
        properties.push(0x26);
        text(&mut properties, name.as_bytes());
        text(&mut properties, value.as_bytes());
    }
    if level == Level::Five {
        varint(&mut body, properties.len());
        body.extend(properties);
    }
    body.extend(&it.payload);
    let flags = u8::from(it.dup) << 3 | it.qos << 1 | u8::from(it.retain);
    packet(0x30 | flags, &body)
}

pub(crate) fn ack(kind: Ack, id: u16) -> Vec<u8> {
    let flags = if kind == Ack::Pubrel { 2 } else { 0 };
    packet((kind as u8) << 4 | flags, &id.to_be_bytes())
}

pub(crate) fn subscribe(level: Level, id: u16, filters: &[(String, u8)]) -> Vec<u8> {
    let mut body = id.to_be_bytes().to_vec();
    if level == Level::Five {
        body.push(0);
    }
    for (filter, qos) in filters {
        text(&mut body, filter.as_bytes());
        body.push(*qos);
    }
    packet(0x82, &body)
}

/// At level four the reason is always zero.
pub(crate) fn disconnect(level: Level, reason: u8) -> Vec<u8> {
    match level {
        Level::Four => packet(0xE0, &[]),
        Level::Five => packet(0xE0, &[reason, 0]),
    }
}

/// Reads the parts of a packet in order.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn short(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().expect("two bytes"))
    }

    fn text(&mut self) -> &'a [u8] {
        let count = self.short();
        self.take(count.into())
    }

    fn string(&mut self) -> String {
        String::from_utf8(self.text().to_vec()).expect("UTF-8")
    }

    fn varint(&mut self) -> usize {
        let (mut number, mut shift) = (0, 0);
        loop {
            let byte = self.byte();
            number |= usize::from(byte & 0x7F) << shift;
            shift += 7;
            if byte < 0x80 {
                return number;
            }
        }
    }

    fn properties(&mut self) -> Reader<'a> {
        let count = self.varint();
        Reader(self.take(count))
    }
}

/// Takes the first packet from the buffer, if it is complete.
pub(crate) fn decode(level: Level, buffer: &mut Vec<u8>) -> Option<Packet> {
    let whole = length(buffer)?;
    let bytes: Vec<u8> = buffer.drain(..whole).collect();
    let first = bytes[0];
    let mut reader = Reader(&bytes[1..]);
    reader.varint();
    Some(read(level, first, reader))
}

/// The length of the first packet, if all of it is here.
pub(crate) fn length(buffer: &[u8]) -> Option<usize> {
    let end = (1..5).find(|at| buffer.get(*at).is_some_and(|byte| *byte < 0x80))?;
    let count = Reader(&buffer[1..=end]).varint();
    (buffer.len() > end + count).then_some(end + 1 + count)
}

fn read(level: Level, first: u8, mut reader: Reader<'_>) -> Packet {
    match first >> 4 {
        2 => Packet::Connack {
            present: reader.byte() == 1,
            reason: reader.byte(),
        },
        3 => Packet::Publish(read_publish(level, first, reader)),
        kind @ 4..=7 => Packet::Ack {
            kind: [Ack::Puback, Ack::Pubrec, Ack::Pubrel, Ack::Pubcomp][usize::from(kind) - 4],
            id: reader.short(),
            reason: match reader.0 {
                [] => 0,
                _ => {
                    assert_eq!(level, Level::Five, "an acknowledgement with a reason");
                    reader.byte()
                }
            },
        },
        9 => {
            let id = reader.short();
            if level == Level::Five {
                reader.properties();
            }
            let reasons = reader.0.to_vec();
            Packet::Suback { id, reasons }
        }
        13 => Packet::Pingresp,
        14 if level == Level::Five => Packet::Disconnect {
            reason: if reader.0.is_empty() {
                0
            } else {
                reader.byte()
            },
        },
        kind => panic!("the broker sent a packet of type {kind}"),
    }
}

fn read_publish(level: Level, first: u8, mut reader: Reader<'_>) -> Publish {
    let qos = first >> 1 & 3;
    let mut it = Publish {
        topic: reader.string(),
        qos,
        retain: first & 1 == 1,
        dup: first & 8 == 8,
        id: if qos > 0 { reader.short() } else { 0 },
        ..Publish::default()
    };
    let mut properties = match level {
        Level::Four => Reader(&[]),
        Level::Five => reader.properties(),
    };
    while !properties.0.is_empty() {
        match properties.byte() {
            0x09 => it.correlation = Some(properties.text().to_vec()),
            0x08 => it.response_topic = Some(properties.string()),
            0x26 => it.user.push((properties.string(), properties.string())),
            0x01 => _ = properties.byte(),
            0x02 => _ = properties.take(4),
            0x03 => _ = properties.text(),
            0x0B => _ = properties.varint(),
            other => panic!("an unexpected property {other}"),
        }
    }
    it.payload = reader.0.to_vec();
    it
}
