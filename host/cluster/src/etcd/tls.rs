//! TLS to etcd, with files that may be replaced while a host runs.
//!
//! A connection that is open keeps its certificates, also beyond their end. So the files are read
//! again when a connection failed, and the next one uses their new content. A file that cannot be
//! used changes nothing.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;

/// How to connect to etcd over TLS.
#[derive(Clone, PartialEq, Eq)]
pub struct Tls {
    /// The certificate authority of the servers, as PEM.
    pub ca_pem: Vec<u8>,
    /// A certificate and its key for this client, as PEM.
    pub identity_pem: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// Reads the certificates and the key again. An error is a text for the operator.
pub type ReadTls = Arc<dyn Fn() -> Result<Tls, String> + Send + Sync>;

/// The certificates of the connection to one server, and how to read them again.
pub(super) struct Renewal {
    read: ReadTls,
    used: Tls,
    read_at: Instant,
    /// Why the files could not be used when they were read last.
    error: Option<String>,
}

impl fmt::Debug for Renewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Renewal");
        debug.field("error", &self.error).finish_non_exhaustive()
    }
}

impl Renewal {
    pub(super) fn new(read: ReadTls, used: Tls) -> Self {
        Self {
            read,
            used,
            read_at: Instant::now(),
            error: None,
        }
    }

    /// Reads the files again, if that was not done a moment ago. Returns the result of `connect` if
    /// their content is new and it succeeds. Logs why it does not, once for each reason.
    pub(super) fn renew<T>(
        &mut self,
        connect: impl FnOnce(&Tls) -> Result<T, String>,
    ) -> Option<T> {
        if self.read_at.elapsed() < limits::CERTIFICATES_PACE {
            return None;
        }
        self.read_at = Instant::now();
        let renewed = (self.read)().and_then(|tls| {
            if tls == self.used {
                return Ok(None);
            }
            let connected = connect(&tls)?;
            self.used = tls;
            Ok(Some(connected))
        });
        let (connected, error) = match renewed {
            Ok(connected) => (connected, None),
            Err(error) => (None, Some(error)),
        };
        if let Some(error) = error.as_ref().filter(|it| self.error.as_ref() != Some(*it)) {
            tracing::error!("{error}; the previous certificates for etcd stay in force");
        }
        self.error = error;
        connected
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn tls(ca: &str) -> Tls {
        Tls {
            ca_pem: ca.into(),
            identity_pem: None,
        }
    }

    #[test]
    fn only_new_files_that_can_be_used_begin_another_connection() {
        let files = Arc::new(Mutex::new(Ok(tls("second"))));
        let read = files.clone();
        let read: ReadTls = Arc::new(move || read.lock().unwrap().clone());
        let mut renewal = Renewal::new(read, tls("first"));
        assert_eq!(renewal.renew(|_| Ok(())), None, "it was read just now");
        for (content, connects, expected) in [
            (Ok("first"), true, None),
            (Err("missing"), true, None),
            // Such as a certificate whose key is not written yet.
            (Ok("second"), false, None),
            (Ok("second"), true, Some(tls("second"))),
            (Ok("second"), true, None),
        ] {
            *files.lock().unwrap() = content.map(tls).map_err(str::to_owned);
            renewal.read_at -= limits::CERTIFICATES_PACE;
            let renewed = renewal.renew(|tls| match connects {
                true => Ok(tls.clone()),
                false => Err("no pair".to_owned()),
            });
            assert_eq!(renewed, expected, "{content:?}");
        }
    }
}
