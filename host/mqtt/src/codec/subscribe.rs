//! SUBSCRIBE and UNSUBSCRIBE (sections 3.8 and 3.10). Filters are copied, since the broker stores
//! them.

use bytes::Bytes;

use super::{
    Bounds, Violation, property as id,
    reader::{Reader, bits},
};
use crate::{
    ProtocolVersion::{V5, V311},
    QoS, ReasonCode, topic,
};

/// A SUBSCRIBE as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subscribe {
    pub(crate) packet_id: u16,
    pub(crate) subscription_id: Option<u32>,
    pub(crate) filters: Vec<Filter>,
}

/// One filter with its options (section 3.8.3.1). The filter itself is not checked here, because an
/// invalid filter has its own code in the SUBACK.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) filter: Bytes,
    pub(crate) qos: QoS,
    pub(crate) no_local: bool,
    pub(crate) retain_as_published: bool,
    pub(crate) retain_handling: RetainHandling,
}

/// When a new subscription gets the retained messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetainHandling {
    Always,
    IfNew,
    Never,
}

/// An UNSUBSCRIBE as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unsubscribe {
    pub(crate) packet_id: u16,
    pub(crate) filters: Vec<Bytes>,
}

const TOO_MANY: Violation = Violation {
    reason: ReasonCode::QUOTA_EXCEEDED,
    text: "too many topic filters in one packet",
};

pub(super) fn read_subscribe(body: &[u8], bounds: Bounds) -> Result<Subscribe, Violation> {
    let mut reader = Reader::new(body);
    let packet_id = reader.packet_id()?;
    let mut subscription_id = None;
    let reserved = match bounds.version {
        // The byte holds only the requested QoS (MQTT 3.1.1 [MQTT-3-8.3-4]).
        V311 => 0xFC,
        V5 => {
            reader.property_section(bits(&[id::SUBSCRIPTION_ID, id::USER_PROPERTY]), |item| {
                if item.id == id::SUBSCRIPTION_ID {
                    subscription_id = Some(item.positive()?);
                }
                Ok(())
            })?;
            0xC0
        }
    };
    let none = "SUBSCRIBE without a topic filter";
    let filters = read_filters(body, &mut reader, bounds, none, |filter, reader| {
        with_options(filter, reader.u8()?, reserved)
    })?;
    Ok(Subscribe {
        packet_id,
        subscription_id,
        filters,
    })
}

fn with_options(filter: Bytes, options: u8, reserved: u8) -> Result<Filter, Violation> {
    if options & reserved != 0 {
        return Err(Violation::malformed(
            "reserved subscription options are set",
        ));
    }
    let no_local = options & 4 != 0;
    // [MQTT-3.8.3-4]
    if no_local && topic::is_shared(&filter) {
        return Err(Violation::protocol(
            "No Local is set for a shared subscription",
        ));
    }
    Ok(Filter {
        filter,
        qos: QoS::from_bits(options & 3).ok_or(Violation::protocol("QoS 3 does not exist"))?,
        no_local,
        retain_as_published: options & 8 != 0,
        retain_handling: match options >> 4 {
            0 => RetainHandling::Always,
            1 => RetainHandling::IfNew,
            2 => RetainHandling::Never,
            _ => return Err(Violation::protocol("retain handling 3 does not exist")),
        },
    })
}

pub(super) fn read_unsubscribe(body: &[u8], bounds: Bounds) -> Result<Unsubscribe, Violation> {
    let mut reader = Reader::new(body);
    let packet_id = reader.packet_id()?;
    if bounds.version == V5 {
        reader.property_section(bits(&[id::USER_PROPERTY]), |_| Ok(()))?;
    }
    let none = "UNSUBSCRIBE without a topic filter";
    let filters = read_filters(body, &mut reader, bounds, none, |filter, _| Ok(filter))?;
    Ok(Unsubscribe { packet_id, filters })
}

/// Reads the filters up to the end of the packet, with what follows each of them. A packet without
/// a filter fails with the text `none`.
fn read_filters<T>(
    body: &[u8],
    reader: &mut Reader<'_>,
    bounds: Bounds,
    none: &'static str,
    complete: impl Fn(Bytes, &mut Reader<'_>) -> Result<T, Violation>,
) -> Result<Vec<T>, Violation> {
    let mut filters = Vec::new();
    while !reader.is_empty() {
        if filters.len() == bounds.filters_max {
            return Err(TOO_MANY);
        }
        let filter = Bytes::copy_from_slice(reader.text()?.of(body));
        // MQTT 3.1.1 has no code for an invalid filter: the connection ends (MQTT 3.1.1
        // [MQTT-4.8.0-1]).
        if bounds.version == V311 {
            topic::check_topics(&filter).map_err(Violation::protocol)?;
        }
        filters.push(complete(filter, reader)?);
    }
    if filters.is_empty() {
        return Err(Violation::protocol(none));
    }
    Ok(filters)
}
