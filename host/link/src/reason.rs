//! Names reason codes of MQTT 5 for people.

use std::fmt::Debug;

use rumqttc::v5::mqttbytes::v5::SubscribeReasonCode;

/// The name of a reason code in words, such as `not authorized`. `reason` is a variant of an enum
/// of rumqttc, which names it only in its debug text, such as `NotAuthorized`.
#[must_use]
pub fn reason_name(reason: &impl Debug) -> String {
    let variant = format!("{reason:?}").replace("QoS", "Qos");
    let mut name = String::with_capacity(2 * variant.len());
    for letter in variant.chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push(' ');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name.replace("qos", "QoS")
}

/// Describes the code for a filter in a SUBACK that does not grant the requested subscription. None
/// is the code of a filter that the SUBACK leaves out.
#[must_use]
pub fn describe_suback(code: Option<&SubscribeReasonCode>) -> String {
    match code {
        Some(SubscribeReasonCode::Success(qos)) => format!("granted at QoS {}", *qos as u8),
        Some(refused) => reason_name(refused),
        None => "no reason code".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use rumqttc::v5::mqttbytes::QoS;
    use rumqttc::v5::mqttbytes::v5::{DisconnectReasonCode, PubAckReason};

    use super::*;

    #[test]
    fn reason_codes_are_named_in_words() {
        let taken_over = DisconnectReasonCode::SessionTakenOver;
        assert_eq!(reason_name(&taken_over), "session taken over");
        assert_eq!(reason_name(&PubAckReason::NotAuthorized), "not authorized");
        let too_high = DisconnectReasonCode::QoSNotSupported;
        assert_eq!(reason_name(&too_high), "QoS not supported");
    }

    #[test]
    fn codes_of_a_suback_are_described() {
        let refused = SubscribeReasonCode::NotAuthorized;
        assert_eq!(describe_suback(Some(&refused)), "not authorized");
        let lower = SubscribeReasonCode::Success(QoS::AtMostOnce);
        assert_eq!(describe_suback(Some(&lower)), "granted at QoS 0");
        assert_eq!(describe_suback(None), "no reason code");
    }
}
