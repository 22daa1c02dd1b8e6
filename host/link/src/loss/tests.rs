//! How the losses of connections are classified and described.

use super::*;

#[test]
fn wrapped_tls_errors_are_described() {
    let revoked = || rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRevoked);
    let io = || io::Error::new(io::ErrorKind::InvalidData, revoked());
    let twice = io::Error::other(io());
    for error in [
        ConnectionError::Io(io()),
        ConnectionError::Io(twice),
        ConnectionError::Tls(TlsError::Io(io())),
        ConnectionError::Tls(TlsError::TLS(revoked())),
        ConnectionError::MqttState(StateError::Io(io())),
        ConnectionError::MqttState(StateError::Deserialization(WireError::Io(io()))),
    ] {
        assert_eq!(describe(&error), "the client's certificate is revoked");
    }
    let plain = ConnectionError::Io(io::ErrorKind::ConnectionRefused.into());
    assert_eq!(describe(&plain), "connection refused");
}

#[test]
fn errors_of_the_verifier_are_described() {
    let of_verifier = |name: &'static str| {
        let error = rustls::OtherError(std::sync::Arc::new(io::Error::other(name)));
        let error = rustls::CertificateError::Other(error);
        describe_tls(&rustls::Error::InvalidCertificate(error))
    };
    for (name, says) in [
        (
            "CaUsedAsEndEntity",
            "its certificate is that of an authority",
        ),
        ("UnsupportedCertVersion", "its certificate has version 1"),
        (
            "UnsupportedCriticalExtension",
            "its certificate has a critical",
        ),
        ("Unnamed", "TLS failed: "),
    ] {
        let text = of_verifier(name);
        assert!(text.starts_with(says), "{text}");
    }
}

#[test]
fn unsupported_signatures_and_purposes_are_described() {
    use rustls::{AlertDescription, CertificateError, Error, ExtendedKeyPurpose};
    let sha1 = CertificateError::UnsupportedSignatureAlgorithmContext {
        signature_algorithm_id: vec![42; 9],
        supported_algorithms: Vec::new(),
    };
    let purpose = CertificateError::InvalidPurposeContext {
        required: ExtendedKeyPurpose::ServerAuth,
        presented: vec![ExtendedKeyPurpose::ClientAuth],
    };
    for (error, says) in [
        (
            sha1.into(),
            "its certificate has a signature by an algorithm",
        ),
        (purpose.into(), "its certificate is for another purpose"),
        (
            Error::AlertReceived(AlertDescription::UnsupportedCertificate),
            "the client's certificate is not one for clients",
        ),
        (
            Error::AlertReceived(AlertDescription::CertificateExpired),
            "the client's certificate has expired or is not valid yet",
        ),
    ] {
        let text = describe_tls(&error);
        assert!(text.starts_with(says) && !text.contains("42"), "{text}");
    }
}

#[test]
fn bytes_that_are_not_mqtt_name_the_port() {
    for error in [
        WireError::InvalidPropertyType(46),
        WireError::MalformedPacket,
    ] {
        let text = describe(&wire(error));
        assert!(
            text.starts_with("it sent bytes that are not MQTT 5"),
            "{text}"
        );
    }
    let outgoing = describe(&wire(WireError::PayloadTooLong));
    assert!(!outgoing.contains("it sent"), "{outgoing}");
}

#[test]
fn websocket_errors_name_the_path_or_the_scheme() {
    let refused = describe_websocket("HTTP error: 404 Not Found");
    assert!(refused.contains("HTTP 404 Not Found: check the path"));
    let other =
        describe_websocket("WebSocket protocol error: httparse error: invalid HTTP version");
    assert!(other.contains("does not speak WebSocket") && other.contains("wss://"));
}

#[test]
fn broker_shutdown_blames_no_message() {
    let said = |reason_code| {
        let error = ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code,
            reason_string: None,
        });
        Blame::of(&error, true)
    };
    assert_eq!(
        said(DisconnectReasonCode::ServerShuttingDown),
        Blame::NoMessage
    );
    assert_eq!(said(DisconnectReasonCode::ProtocolError), Blame::Message);
    let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
    let refused = ConnectionError::Io(refused);
    assert_eq!(Blame::of(&refused, false), Blame::NoMessage);
}

#[test]
fn control_characters_of_a_reason_string_are_replaced() {
    let error = ConnectionError::MqttState(StateError::ServerDisconnect {
        reason_code: DisconnectReasonCode::NotAuthorized,
        reason_string: Some("no\n\x1b[31m".to_owned()),
    });
    let expected = "the broker closed it (not authorized: no\u{fffd}\u{fffd}[31m)";
    assert_eq!(describe(&error), expected);
}

fn wire(error: WireError) -> ConnectionError {
    ConnectionError::MqttState(StateError::Deserialization(error))
}

#[test]
fn unknown_reason_of_a_puback_blames_a_message() {
    let too_large = wire(WireError::InvalidConnectReturnCode(PACKET_TOO_LARGE));
    for connected in [true, false] {
        let blame = Blame::of(&too_large, connected);
        assert_eq!(blame, Blame::Puback(PACKET_TOO_LARGE));
    }
    for text in [describe(&too_large), describe_loss(&too_large, true)] {
        assert_eq!(
            text,
            "the broker refused a message with reason 0x95 (packet too large): see message_size_limit of Mosquitto"
        );
    }
    let rate = wire(WireError::InvalidConnectReturnCode(0x96));
    assert_eq!(Blame::of(&rate, true), Blame::Puback(0x96));
    assert_eq!(
        describe_loss(&rate, true),
        "the broker refused a message with reason 0x96"
    );
    // It may have been in a DISCONNECT.
    let undefined = wire(WireError::InvalidConnectReturnCode(0xAA));
    assert_eq!(Blame::of(&undefined, true), Blame::Message);
    let text = describe_loss(&undefined, true);
    assert!(text.starts_with("the broker sent reason 0xAA"), "{text}");
}

#[test]
fn unknown_reason_before_the_connection_blames_no_message() {
    let refused = wire(WireError::InvalidConnectReturnCode(1));
    assert_eq!(Blame::of(&refused, false), Blame::NoMessage);
    assert!(describe_loss(&refused, false).contains("not MQTT 5"));
}

#[test]
fn unknown_reason_of_a_suback_is_described() {
    let refused = wire(WireError::InvalidSubscribeReasonCode(0x95));
    assert_eq!(Blame::of(&refused, true), Blame::NoMessage);
    let text = describe_loss(&refused, true);
    assert!(text.contains("a subscription with reason 0x95"), "{text}");
}
