//! Why a connection was lost: in words, and what it means for the next one.

use std::error::Error;
use std::io;

use rumqttc::TlsError;
use rumqttc::v5::mqttbytes::Error as WireError;
use rumqttc::v5::mqttbytes::v5::DisconnectReasonCode;
use rumqttc::v5::{ConnectionError, StateError};

/// Trying again would only take the session back from whoever took it.
pub(crate) fn is_final(error: &ConnectionError) -> bool {
    matches!(
        error,
        ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code: DisconnectReasonCode::SessionTakenOver,
            ..
        })
    )
}

/// What a loss says of the messages in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// They have no part in it.
    Nobody,
    /// Somebody at the other side closed the connection and did not say why: one of them may have made it.
    Anybody,
    /// The broker says that it was sent what it cannot take.
    Message,
}

impl Blame {
    /// What this error says.
    pub(crate) fn of(error: &ConnectionError) -> Self {
        use DisconnectReasonCode as Code;
        let ConnectionError::MqttState(error) = error else {
            return Self::Nobody;
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
            StateError::ConnectionAborted => Self::Anybody,
            // Where we were writing, this hides the DISCONNECT that came before.
            StateError::Io(error) | StateError::Deserialization(WireError::Io(error)) => {
                match error.kind() {
                    io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::UnexpectedEof => Self::Anybody,
                    _ => Self::Nobody,
                }
            }
            // What rumqttc cannot write.
            StateError::OutgoingPacketTooLarge { .. }
            | StateError::Deserialization(
                WireError::OutgoingPacketTooLarge { .. } | WireError::PayloadTooLong,
            ) => Self::Anybody,
            _ => Self::Nobody,
        }
    }
}

/// rumqttc's own state may be wrong: everything but the connection itself failing.
pub(crate) fn is_confused(error: &ConnectionError) -> bool {
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

/// What happened, as the end of a sentence.
#[must_use]
pub fn describe(error: &ConnectionError) -> String {
    if let Some(error) = tls_error(error) {
        return describe_tls(error);
    }
    match error {
        ConnectionError::Tls(TlsError::Io(error))
            if error.kind() == io::ErrorKind::UnexpectedEof =>
        {
            "it ended the handshake of TLS: does it speak TLS at all?".into()
        }
        ConnectionError::Io(error)
        | ConnectionError::MqttState(
            StateError::Io(error) | StateError::Deserialization(WireError::Io(error)),
        )
        | ConnectionError::Tls(TlsError::Io(error)) => describe_io(error),
        ConnectionError::Timeout(_) => "no answer in time".into(),
        ConnectionError::ConnectionRefused(code) => {
            format!("the broker refused the connection ({code:?})")
        }
        ConnectionError::MqttState(StateError::ServerDisconnect {
            reason_code,
            reason_string,
        }) => match reason_string {
            Some(text) => format!("the broker closed it ({reason_code:?}: {text})"),
            None => format!("the broker closed it ({reason_code:?})"),
        },
        ConnectionError::MqttState(StateError::ConnectionAborted) => {
            "the broker closed it without a reason".into()
        }
        ConnectionError::MqttState(StateError::AwaitPingResp) => {
            "the broker does not answer any more".into()
        }
        other => other.to_string(),
    }
}

/// What TLS says of it, wherever it stands: rumqttc, async-tungstenite and tokio-rustls wrap it, each in its own way.
fn tls_error(error: &ConnectionError) -> Option<&rustls::Error> {
    match error {
        // It names no source.
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
        // The source of an error of I/O is that of what it wraps.
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
            "its certificate was issued by nobody who is trusted here: give the certificate of its authority"
        }
        Error::InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. }) => {
            "its certificate has expired"
        }
        Error::InvalidCertificate(Bad::NotValidYet | Bad::NotValidYetContext { .. }) => {
            "its certificate is not valid yet: is the clock of this machine right?"
        }
        Error::InvalidCertificate(Bad::NotValidForName | Bad::NotValidForNameContext { .. }) => {
            "its certificate is for another name than the one it was reached by"
        }
        Error::InvalidCertificate(Bad::Revoked) => "its certificate is revoked",
        Error::AlertReceived(Alert::CertificateRequired) => {
            "it wants a certificate of the client, and none was given"
        }
        Error::AlertReceived(Alert::UnknownCA) => {
            "it does not trust whoever issued the client's certificate"
        }
        Error::AlertReceived(Alert::CertificateExpired) => "the client's certificate has expired",
        Error::AlertReceived(Alert::CertificateRevoked) => "the client's certificate is revoked",
        Error::AlertReceived(Alert::BadCertificate | Alert::CertificateUnknown) => {
            "it does not accept the client's certificate"
        }
        Error::AlertReceived(Alert::HandshakeFailure | Alert::ProtocolVersion) => {
            "it has no version or cipher of TLS in common with this client"
        }
        Error::InvalidMessage(_) => "what answers there does not speak TLS",
        other => return format!("TLS failed: {other}"),
    };
    what.to_owned()
}

/// Why a connection could not be made, or was lost, in words for an operator.
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
mod tests {
    use super::*;

    #[test]
    fn errors_of_tls_are_found_wherever_they_stand_and_are_said_in_words() {
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
    fn a_broker_that_shuts_down_blames_nobody() {
        let said = |reason_code| {
            Blame::of(&ConnectionError::MqttState(StateError::ServerDisconnect {
                reason_code,
                reason_string: None,
            }))
        };
        assert_eq!(
            said(DisconnectReasonCode::ServerShuttingDown),
            Blame::Nobody
        );
        assert_eq!(said(DisconnectReasonCode::ProtocolError), Blame::Message);
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert_eq!(Blame::of(&ConnectionError::Io(refused)), Blame::Nobody);
    }
}
