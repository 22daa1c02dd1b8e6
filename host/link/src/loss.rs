//! Classifies the loss of a connection and describes it in words.

use std::error::Error;
use std::fmt::Display;
use std::io;

use rumqttc::TlsError;
use rumqttc::v5::mqttbytes::Error as WireError;
use rumqttc::v5::mqttbytes::v5::{ConnectReturnCode, DisconnectReasonCode};
use rumqttc::v5::{ConnectionError, StateError};

use crate::reason::reason_name;

/// Reason code 0x95 of MQTT 5. Mosquitto sends it in a PUBACK if a payload is longer than its
/// `message_size_limit`. rumqttc 0.25 knows it in CONNACK and DISCONNECT only.
pub(crate) const PACKET_TOO_LARGE: u8 = 0x95;

/// Whether the broker reports that another connection took over the session.
pub(crate) fn is_takeover(error: &ConnectionError) -> bool {
    matches!(
        error,
        ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code: DisconnectReasonCode::SessionTakenOver,
            ..
        })
    )
}

/// Whether a message in flight may have caused the loss of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// The loss has nothing to do with a message.
    NoMessage,
    /// The connection was closed without a reason, so a message in flight may be the cause.
    Unknown,
    /// The broker reports that it received something that it does not accept.
    Message,
    /// A PUBACK has this reason code, which rumqttc cannot read. So one of the messages in flight
    /// is refused, and the error does not say which one.
    Puback(u8),
}

impl Blame {
    /// Classifies an error. `connected` says whether the broker had accepted the connection.
    pub(crate) fn of(error: &ConnectionError, connected: bool) -> Self {
        use DisconnectReasonCode as Code;
        if let Some(code) = unknown_reason(error, connected) {
            // rumqttc knows this code in a DISCONNECT, so it was in another packet. Otherwise it
            // may have been in a DISCONNECT too.
            return match Code::try_from(code) {
                Ok(_) => Self::Puback(code),
                Err(_) => Self::Message,
            };
        }
        let ConnectionError::MqttState(error) = error else {
            return Self::NoMessage;
        };
        match error {
            StateError::ServerDisconnect {
                reason_code:
                    Code::UnspecifiedError
                    | Code::MalformedPacket
                    | Code::ProtocolError
                    | Code::ImplementationSpecificError
                    | Code::NotAuthorized
                    | Code::TopicNameInvalid
                    | Code::PacketTooLarge
                    | Code::QuotaExceeded
                    | Code::PayloadFormatInvalid
                    | Code::RetainNotSupported
                    | Code::QoSNotSupported,
                ..
            } => Self::Message,
            StateError::ConnectionAborted => Self::Unknown,
            // During a write, this error hides a DISCONNECT that arrived before.
            StateError::Io(error) | StateError::Deserialization(WireError::Io(error))
                if is_end(error) =>
            {
                Self::Unknown
            }
            // Packets that rumqttc cannot write.
            StateError::OutgoingPacketTooLarge { .. }
            | StateError::Deserialization(
                WireError::OutgoingPacketTooLarge { .. } | WireError::PayloadTooLong,
            ) => Self::Unknown,
            _ => Self::NoMessage,
        }
    }
}

/// Whether the other side ended the connection.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), ConnectionReset | BrokenPipe | UnexpectedEof)
}

/// Whether the broker ended the connection without a decision about the client: it stops, or it is
/// a cluster without a leader. Another attempt may succeed soon.
#[must_use]
pub fn is_unavailable(error: &ConnectionError) -> bool {
    match error {
        ConnectionError::ConnectionRefused(ConnectReturnCode::ServerUnavailable)
        | ConnectionError::MqttState(
            StateError::ConnectionAborted
            | StateError::ServerDisconnect {
                reason_code: DisconnectReasonCode::ServerShuttingDown,
                ..
            },
        ) => true,
        ConnectionError::MqttState(
            StateError::Io(error) | StateError::Deserialization(WireError::Io(error)),
        ) => is_end(error),
        _ => false,
    }
}

/// The reason code that rumqttc 0.25 does not know in the packet that has it: in a PUBACK, a PUBREC
/// or a DISCONNECT if the broker had accepted the connection. It reports the same error for a
/// CONNACK, but it knows [`PACKET_TOO_LARGE`] there.
fn unknown_reason(error: &ConnectionError, connected: bool) -> Option<u8> {
    match error {
        ConnectionError::MqttState(StateError::Deserialization(
            WireError::InvalidConnectReturnCode(code),
        )) if connected || *code == PACKET_TOO_LARGE => Some(*code),
        _ => None,
    }
}

/// Whether the state of rumqttc may be wrong. This is true for all errors except failures of the
/// connection itself.
pub(crate) fn needs_rebuild(error: &ConnectionError) -> bool {
    match error {
        ConnectionError::MqttState(error) => !matches!(
            error,
            StateError::Io(_)
                | StateError::ConnectionAborted
                | StateError::ServerDisconnect { .. }
                | StateError::AwaitPingResp
                | StateError::Deserialization(_)
        ),
        _ => false,
    }
}

/// Whether the broker refused the client itself, so that another attempt gets the same answer for a
/// while.
#[must_use]
pub fn is_refusal(error: &ConnectionError) -> bool {
    use ConnectReturnCode as Code;
    matches!(
        error,
        ConnectionError::ConnectionRefused(
            Code::BadUserNamePassword
                | Code::NotAuthorized
                | Code::Banned
                | Code::BadClientId
                | Code::ClientIdentifierNotValid
                | Code::BadAuthenticationMethod
                | Code::ConnectionRateExceeded
        )
    )
}

/// Whether the refusal passes by itself.
pub(crate) fn is_rate_refusal(error: &ConnectionError) -> bool {
    matches!(
        error,
        ConnectionError::ConnectionRefused(ConnectReturnCode::ConnectionRateExceeded)
    )
}

fn describe_refusal(code: ConnectReturnCode) -> String {
    use ConnectReturnCode as Code;
    let refused = "the broker refused the connection";
    match code {
        Code::BadUserNamePassword => format!("{refused}: wrong user name or password"),
        Code::NotAuthorized => format!("{refused}: this client is not authorized to connect"),
        Code::Banned => format!("{refused}: this client is banned"),
        Code::BadClientId | Code::ClientIdentifierNotValid => {
            format!("{refused}: it does not accept this client id")
        }
        Code::ConnectionRateExceeded => {
            format!(
                "{refused}: too many logins failed, or it limits the rate of connections; try again in a minute"
            )
        }
        other => format!("{refused} ({})", reason_name(&other)),
    }
}

/// Describes the reason code of a PUBACK that refuses a message, as the end of a sentence.
#[must_use]
pub fn describe_reason(code: u8) -> String {
    match code {
        PACKET_TOO_LARGE => {
            format!("reason 0x{code:02X} (packet too large): see message_size_limit of Mosquitto")
        }
        _ => format!("reason 0x{code:02X}"),
    }
}

fn describe_puback(code: u8) -> String {
    format!(
        "the broker refused a message with {}",
        describe_reason(code)
    )
}

/// Describes the end of a connection as the second half of a sentence. `connected` says whether the
/// broker had accepted it.
pub(crate) fn describe_loss(error: &ConnectionError, connected: bool) -> String {
    if let Some(code) = unknown_reason(error, connected) {
        return match Blame::of(error, connected) {
            Blame::Puback(code) => describe_puback(code),
            _ => format!("the broker sent reason 0x{code:02X}, which this client does not know"),
        };
    }
    match error {
        ConnectionError::MqttState(StateError::Deserialization(
            WireError::InvalidSubscribeReasonCode(code),
        )) if connected => format!(
            "the broker refused a subscription with reason 0x{code:02X}, which this client does not know"
        ),
        other => describe(other),
    }
}

/// Describes the error as the second half of a sentence.
#[must_use]
pub fn describe(error: &ConnectionError) -> String {
    if let Some(error) = tls_error(error) {
        return describe_tls(error);
    }
    if let Some(code) = unknown_reason(error, false) {
        return describe_puback(code);
    }
    match error {
        ConnectionError::Tls(TlsError::Io(error))
            if error.kind() == io::ErrorKind::UnexpectedEof =>
        {
            "it closed the connection during the TLS handshake; it may not speak TLS".into()
        }
        ConnectionError::Io(error)
        | ConnectionError::MqttState(
            StateError::Io(error) | StateError::Deserialization(WireError::Io(error)),
        )
        | ConnectionError::Tls(TlsError::Io(error)) => describe_io(error),
        ConnectionError::Timeout(_) => "no answer in time".into(),
        ConnectionError::ConnectionRefused(code) => describe_refusal(*code),
        ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code,
            reason_string,
        }) => match reason_string {
            // Terminals print this text, which the broker chooses.
            Some(text) => format!(
                "the broker closed it ({}: {})",
                reason_name(reason_code),
                text.replace(char::is_control, "\u{fffd}")
            ),
            None => format!("the broker closed it ({})", reason_name(reason_code)),
        },
        ConnectionError::MqttState(StateError::ConnectionAborted) => {
            "the broker closed it without a reason".into()
        }
        ConnectionError::MqttState(StateError::AwaitPingResp) => {
            "the broker does not answer PINGREQ".into()
        }
        ConnectionError::Websocket(error) => {
            let within = error.source().and_then(|it| it.downcast_ref::<io::Error>());
            match within {
                Some(error) => describe_io(error),
                None => describe_websocket(&error.to_string()),
            }
        }
        ConnectionError::ResponseValidation(_) => {
            "the server accepts the WebSocket, but not for MQTT: check the path of the URL".into()
        }
        ConnectionError::NotConnAck(_) => not_mqtt("the first packet is no CONNACK"),
        ConnectionError::MqttState(StateError::Deserialization(error))
            if !matches!(
                error,
                WireError::OutgoingPacketTooLarge { .. } | WireError::PayloadTooLong
            ) =>
        {
            not_mqtt(error)
        }
        other => other.to_string(),
    }
}

/// Describes the text of tungstenite for a handshake that failed. The crate of its type is no
/// dependency.
fn describe_websocket(text: &str) -> String {
    match text.strip_prefix("HTTP error: ") {
        Some(status) => format!(
            "the server refuses the WebSocket with HTTP {status}: check the path of the URL, such as /mqtt"
        ),
        None => format!(
            "the server does not speak WebSocket ({text}); a TLS port needs wss://, and a port of MQTT alone mqtt://"
        ),
    }
}

fn not_mqtt(error: impl Display) -> String {
    format!(
        "it sent bytes that are not MQTT 5 ({error}); a TLS port needs mqtts://, and another service has another port"
    )
}

/// The error of TLS, if there is one inside. rumqttc, async-tungstenite and tokio-rustls wrap it in
/// different ways.
fn tls_error(error: &ConnectionError) -> Option<&rustls::Error> {
    match error {
        // This error does not implement `source`.
        ConnectionError::MqttState(StateError::Deserialization(error)) => tls_within(error),
        error => tls_within(error),
    }
}

fn tls_within<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        // `source` of an I/O error skips the error that it wraps.
        let wrapped = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        next = wrapped
            .map(|it| it as &(dyn Error + 'static))
            .or_else(|| error.source());
    }
    None
}

fn describe_tls(error: &rustls::Error) -> String {
    use rustls::AlertDescription as Alert;
    use rustls::CertificateError as Bad;
    use rustls::Error;
    let what = match error {
        Error::InvalidCertificate(Bad::UnknownIssuer) => {
            "no authority that is trusted here issued its certificate: give the certificate of its authority"
        }
        Error::InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. }) => {
            "its certificate has expired"
        }
        Error::InvalidCertificate(Bad::NotValidYet | Bad::NotValidYetContext { .. }) => {
            "its certificate is not valid yet: is the clock of this machine right?"
        }
        Error::InvalidCertificate(Bad::NotValidForName | Bad::NotValidForNameContext { .. }) => {
            "its certificate is for another name than the configured host name"
        }
        Error::InvalidCertificate(Bad::Revoked) => "its certificate is revoked",
        Error::AlertReceived(Alert::CertificateRequired) => {
            "it wants a certificate of the client, and none was given"
        }
        Error::AlertReceived(Alert::UnknownCA) => {
            "it does not trust the authority that issued the client's certificate"
        }
        Error::AlertReceived(Alert::CertificateExpired) => {
            "the client's certificate has expired or is not valid yet"
        }
        Error::AlertReceived(Alert::UnsupportedCertificate) => {
            "the client's certificate is not one for clients: issue it with `extendedKeyUsage=clientAuth`"
        }
        Error::AlertReceived(Alert::CertificateRevoked) => "the client's certificate is revoked",
        Error::AlertReceived(Alert::BadCertificate | Alert::CertificateUnknown) => {
            "it does not accept the client's certificate"
        }
        Error::AlertReceived(Alert::HandshakeFailure | Alert::ProtocolVersion) => {
            "it has no version or cipher of TLS in common with this client"
        }
        Error::InvalidMessage(_) => "the server at this address does not speak TLS",
        other => {
            return match describe_certificate(other) {
                Some(what) => format!("its certificate {what}"),
                None => format!("TLS failed: {other}"),
            };
        }
    };
    what.to_owned()
}

/// Describes a certificate that the verifier does not support, after its name in a sentence. `None`
/// for all other errors.
#[must_use]
pub fn describe_certificate(error: &rustls::Error) -> Option<&'static str> {
    use rustls::CertificateError as Bad;
    let rustls::Error::InvalidCertificate(error) = error else {
        return None;
    };
    let error = match error {
        // The texts of rustls for these list the numbers of algorithms.
        Bad::UnsupportedSignatureAlgorithmContext { .. }
        | Bad::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            return Some(
                "has a signature by an algorithm that is not supported, such as SHA-1: issue it with SHA-256",
            );
        }
        Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
            return Some(
                "is for another purpose: issue it with `extendedKeyUsage=serverAuth` for a server, and `clientAuth` for a client",
            );
        }
        Bad::Other(error) => error,
        _ => return None,
    };
    // The verifier has a type of its own for these errors, of a crate that is no dependency.
    let name = format!("{error:?}");
    let flaws = [
        (
            "CaUsedAsEndEntity",
            "is that of an authority, which `openssl req -x509` makes by default: make another one with `-addext basicConstraints=critical,CA:FALSE`",
        ),
        (
            "UnsupportedCertVersion",
            "has version 1 of X.509: issue it with extensions, such as by `openssl x509 -req -extfile FILE`",
        ),
        (
            "UnsupportedCriticalExtension",
            "has a critical extension that is not supported: issue it without this extension",
        ),
    ];
    let flaw = flaws.into_iter().find(|(it, _)| name.contains(it));
    flaw.map(|(_, what)| what)
}

/// Whether a connection failed because no trusted authority issued the server's certificate.
#[must_use]
pub fn is_untrusted(error: &io::Error) -> bool {
    use rustls::{CertificateError::UnknownIssuer, Error::InvalidCertificate};
    matches!(tls_within(error), Some(InvalidCertificate(UnknownIssuer)))
}

/// Describes an I/O error of a connection for an operator.
#[must_use]
pub fn describe_io(error: &io::Error) -> String {
    if let Some(error) = tls_within(error) {
        return describe_tls(error);
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused".into(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "connection reset".into(),
        io::ErrorKind::HostUnreachable => "no route to the host".into(),
        io::ErrorKind::NetworkUnreachable => "no route to the network".into(),
        io::ErrorKind::TimedOut => "no answer in time".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
