//! The certificates of the listeners.
//!
//! Reads the files and builds the configuration of handshakes, or an error that names the wrong
//! file. Together with [`revocation`](super::revocation), this is the only module that verifies
//! certificates of clients: their chain, their validity period, and whether they were revoked.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use statehouse_link::{describe_certificate, tls};
use statehouse_mqtt::Proof;
use x509_cert::Certificate;
use x509_cert::der::Decode;

use super::revocation::{RevocationList, Verifier};
use statehouse_config::{TlsFiles, limits};
use statehouse_files::watch::{FileError, Watched, read_file};

/// Why the certificates cannot be used. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of certificates or a key is invalid.
    #[error(transparent)]
    File(#[from] tls::TlsError),
    /// A file of revoked certificates cannot be read.
    #[error(transparent)]
    Revoked(#[from] FileError),
    /// A file contains no list of revoked certificates.
    #[error("{0} holds no list of revoked certificates (CRL) in PEM form")]
    NoList(PathBuf),
    /// A list of revoked certificates is invalid.
    #[error("{0} holds a list of revoked certificates (CRL) that cannot be used: {1}")]
    List(PathBuf, webpki::Error),
    /// A list of revoked certificates is a forgery, or one of another authority with this name.
    #[error(
        "{0} holds a list of revoked certificates (CRL) of {1}, but no authority of this name in {2} has signed it"
    )]
    ForgedList(PathBuf, String, PathBuf),
    /// No client certificate could be accepted.
    #[error(
        "none of the lists of revoked certificates (CRL) is of an authority in {0}, so every client certificate would be refused"
    )]
    OtherLists(PathBuf),
    /// The authorities cannot be used.
    #[error("the certificates of clients cannot be checked against {0}: {1}")]
    Clients(PathBuf, VerifierBuilderError),
    /// A certificate and a key do not belong together, or are of an unknown kind.
    #[error("the certificate {0} cannot be used with the key {1}: {why}", why = tls::pair_reason(.2))]
    Pair(PathBuf, PathBuf, rustls::Error),
    /// TLS itself cannot be set up.
    #[error("TLS cannot be used: {0}")]
    Setup(rustls::Error),
}

/// The certificates and the key for handshakes.
pub struct Certificates {
    pub(super) config: Arc<ServerConfig>,
    clients: Option<Clients>,
    /// Different each time that the files are read.
    number: u64,
}

/// The certificate chain of a connected client. It is verified again after a reload, because a
/// certificate may have been revoked, or its issuer may not be trusted any longer. The expiry of a
/// certificate ends no connection.
pub(super) struct ClientChain {
    certificates: Arc<Watched<Certificates>>,
    chain: Arc<[Vec<u8>]>,
    /// The time of the handshake. Later verifications use this time.
    at: UnixTime,
    /// The number of the [`Certificates`] that accepted the chain last.
    accepted_by: AtomicU64,
}

impl ClientChain {
    /// A chain that `by` has just verified.
    pub(super) fn new(
        certificates: Arc<Watched<Certificates>>,
        by: &Certificates,
        chain: Arc<[Vec<u8>]>,
    ) -> Self {
        Self {
            certificates,
            chain,
            at: UnixTime::now(),
            accepted_by: AtomicU64::new(by.number),
        }
    }
}

impl Proof for ClientChain {
    fn is_good(&self) -> bool {
        let current = self.certificates.current();
        if self.accepted_by.load(Ordering::Relaxed) == current.number {
            return true;
        }
        let clients = current.clients.as_ref();
        let is_good = clients.is_some_and(|clients| clients.accepts(&self.chain, self.at));
        if is_good {
            self.accepted_by.store(current.number, Ordering::Relaxed);
        }
        is_good
    }
}

/// Decides which client certificates are accepted.
pub(super) struct Clients {
    pub(super) verifier: Arc<dyn ClientCertVerifier>,
    roots: Vec<CertificateDer<'static>>,
}

impl Certificates {
    /// Reads the files, for TLS 1.3 and 1.2. Fails if a file cannot be read, or its contents are
    /// invalid.
    pub fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Setup)?;
        let clients = match &files.client_ca {
            Some(ca) => Some(Clients::load(ca, files)?),
            None => None,
        };
        let builder = match &clients {
            Some(clients) => builder.with_client_cert_verifier(clients.verifier.clone()),
            None => builder.with_no_client_auth(),
        };
        let chain = tls::chain(&files.certificate)?;
        let key = tls::private_key(&files.key)?;
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| TlsError::Pair(files.certificate.clone(), files.key.clone(), error))?;
        if clients.is_some() {
            // A client that resumes a TLS session sends no certificate. The one of the first
            // handshake may have expired since.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        static READ: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            config: Arc::new(config),
            clients,
            number: READ.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Everything that is wrong with the files: [`Certificates::load`] returns the first of these
    /// errors.
    pub fn check(files: &TlsFiles) -> Vec<TlsError> {
        let own = [
            tls::chain(&files.certificate).err(),
            tls::private_key(&files.key).err(),
        ];
        let own = own.into_iter().flatten().map(TlsError::File);
        let clients = files.client_ca.as_ref().map(|ca| Clients::load(ca, files));
        let clients = clients.and_then(Result::err);
        let mut wrong: Vec<TlsError> = own.chain(clients).collect();
        if wrong.is_empty() {
            wrong.extend(Self::load(files).err());
        }
        wrong
    }

    /// The chain of a client after a successful handshake: see [`Clients::chain`]. Empty if the
    /// client sent no certificate, or the listener did not request one.
    pub(super) fn chain(&self, sent: &[CertificateDer<'_>]) -> Option<Arc<[Vec<u8>]>> {
        match (&self.clients, sent.split_first()) {
            (Some(clients), Some((own, others))) => clients.chain(own, others),
            _ => Some(Arc::default()),
        }
    }
}

/// Sorts the certificates: each follows the one that it issued.
fn in_order<'a>(
    own: &CertificateDer<'_>,
    mut others: Vec<CertificateDer<'a>>,
) -> Vec<CertificateDer<'a>> {
    let mut ordered: Vec<CertificateDer<'a>> = Vec::with_capacity(others.len());
    while let Some(next) = others
        .iter()
        .position(|other| is_issued_by(ordered.last().unwrap_or(own), other))
    {
        ordered.push(others.remove(next));
    }
    ordered
}

/// Whether a certificate names the other as its issuer. The signature is already verified.
pub(super) fn is_issued_by(certificate: &CertificateDer<'_>, issuer: &CertificateDer<'_>) -> bool {
    let parsed = |der| Certificate::from_der(der).ok();
    match (parsed(certificate), parsed(issuer)) {
        (Some(certificate), Some(issuer)) => {
            certificate.tbs_certificate.issuer == issuer.tbs_certificate.subject
        }
        _ => false,
    }
}

impl Clients {
    pub(super) fn load(ca: &Path, files: &TlsFiles) -> Result<Self, TlsError> {
        let roots = tls::certificates(ca)?;
        let mut trusted = RootCertStore::empty();
        for root in &roots {
            trusted
                .add(root.clone())
                .map_err(|error| tls::TlsError::Certificate(ca.to_owned(), error))?;
        }
        let trusted = Arc::new(trusted);
        let mut revoked = Vec::new();
        for path in &files.client_crls {
            for list in lists(path)? {
                let list = RevocationList::read(&list, &trusted);
                let list = list.map_err(|error| TlsError::List(path.clone(), error))?;
                if !list.is_trusted() && list.names_any(&trusted) {
                    let (path, ca) = (path.clone(), ca.to_owned());
                    return Err(TlsError::ForgedList(path, list.issuer(), ca));
                }
                revoked.push(list);
            }
        }
        // A list of another name may be that of an intermediate authority.
        if !revoked.is_empty() && !revoked.iter().any(RevocationList::is_trusted) {
            return Err(TlsError::OtherLists(ca.to_owned()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut verifier = WebPkiClientVerifier::builder_with_provider(trusted.clone(), provider);
        let names = trusted.roots.iter().map(|it| it.subject.len());
        if names.sum::<usize>() > limits::CLIENT_CA_NAMES_BYTES_MAX {
            verifier = verifier.clear_root_hint_subjects();
        }
        let verifier = match files.client_required {
            true => verifier,
            false => verifier.allow_unauthenticated(),
        };
        let verifier = verifier
            .build()
            .map_err(|error| TlsError::Clients(ca.to_owned(), error))?;
        Ok(Self {
            verifier: Arc::new(Verifier::new(verifier, trusted, revoked)),
            roots,
        })
    }

    /// Whether a chain from [`chain`](Self::chain) would have been accepted at that time.
    fn accepts(&self, chain: &[Vec<u8>], at: UnixTime) -> bool {
        let mut chain = chain.iter().map(|der| CertificateDer::from(&der[..]));
        let Some(own) = chain.next() else {
            return false;
        };
        let others: Vec<_> = chain.collect();
        let verified = self.verifier.verify_client_cert(&own, &others, at);
        verified.is_ok()
    }

    /// The certificates from the client's own to the root, in DER, the root last. A client may send
    /// unrelated certificates as well, which prove nothing: they are left out. None if the client
    /// sent more than [`limits::CLIENT_CERTIFICATES_MAX`].
    fn chain(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
    ) -> Option<Arc<[Vec<u8>]>> {
        if others.len() >= limits::CLIENT_CERTIFICATES_MAX {
            return None;
        }
        let mut between = others.to_vec();
        let now = UnixTime::now();
        // A certificate is unrelated if the chain verifies without it.
        for index in (0..between.len()).rev() {
            let without = between.remove(index);
            let verified = self.verifier.verify_client_cert(own, &between, now);
            if verified.is_err() {
                between.insert(index, without);
            }
        }
        let between = in_order(own, between);
        let last = between.last().unwrap_or(own);
        let root = self.roots.iter().find(|root| is_issued_by(last, root));
        let chain = [own].into_iter().chain(&between).chain(root);
        Some(chain.map(|it| it.to_vec()).collect())
    }
}

fn lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let text = tls::without_marks(&read_file(path, limits::CRL_FILE_BYTES_MAX)?);
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(TlsError::NoList(path.to_owned())),
    }
}

/// Why a handshake failed, for the log.
pub(super) fn describe_failure(error: &io::Error) -> String {
    use rustls::{CertificateError as Bad, Error, PeerIncompatible};
    let Some(error) = error.get_ref().and_then(|it| it.downcast_ref::<Error>()) else {
        return error.to_string();
    };
    let what = match error {
        Error::InvalidCertificate(Bad::UnknownIssuer) => {
            "no authority in --tls-client-ca issued the client's certificate"
        }
        Error::InvalidCertificate(Bad::Revoked) => {
            "the client's certificate, or that of one of its authorities, is revoked"
        }
        Error::InvalidCertificate(Bad::UnknownRevocationStatus) => {
            "no list of --tls-client-crl is for the client's certificate, or for that of one of its authorities"
        }
        Error::PeerIncompatible(PeerIncompatible::NoKxGroupsInCommon) => {
            "the client offers none of the key exchange groups X25519, P-256 and P-384"
        }
        error => {
            return match describe_certificate(error) {
                Some(what) => format!("the client's certificate {what}"),
                None => error.to_string(),
            };
        }
    };
    what.to_owned()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn key_of_another_certificate_is_named() {
        let mismatch = rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch);
        let error = TlsError::Pair("a.crt".into(), "b.key".into(), mismatch).to_string();
        assert!(
            error.ends_with("the key belongs to another certificate"),
            "{error}"
        );
    }

    #[test]
    fn failures_of_handshakes_are_described() {
        use rustls::{CertificateError as Bad, Error, OtherError, PeerIncompatible};
        use webpki::Error as Webpki;
        fn described(error: impl Into<Error>) -> String {
            let error: Error = error.into();
            describe_failure(&io::Error::new(io::ErrorKind::InvalidData, error))
        }
        let verifier = |error: Webpki| described(Bad::Other(OtherError(Arc::new(error))));
        let extension = Webpki::UnsupportedCriticalExtension;
        let none = Error::NoCertificatesPresented;
        for (text, says) in [
            (verifier(Webpki::CaUsedAsEndEntity), "that of an authority"),
            (verifier(Webpki::UnsupportedCertVersion), "has version 1"),
            (verifier(extension), "a critical extension"),
            (described(Bad::UnknownRevocationStatus), "--tls-client-crl"),
            (described(Bad::UnknownIssuer), "--tls-client-ca"),
            (described(PeerIncompatible::NoKxGroupsInCommon), "X25519"),
            (described(none), "peer sent no certificates"),
        ] {
            assert!(text.contains(says), "{text}");
        }
    }

    /// The file NAME.pem of `fixtures/`, generated by `make.sh` in that directory.
    pub(crate) fn fixture(name: &str) -> PathBuf {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fixtures");
        fixtures.join(format!("{name}.pem"))
    }

    /// Accepts certificates issued by the root, except those in these lists.
    fn clients(client_crls: Vec<PathBuf>) -> Result<Clients, TlsError> {
        let files = TlsFiles {
            certificate: PathBuf::new(),
            key: PathBuf::new(),
            client_ca: None,
            client_crls,
            client_required: true,
        };
        Clients::load(&fixture("root"), &files)
    }

    fn der(name: &str) -> CertificateDer<'static> {
        let mut found = tls::certificates(&fixture(name)).unwrap();
        found.remove(0)
    }

    /// The names in the chain if the sensor sends its own certificate and these.
    fn chain_with(others: &[&str]) -> Option<Vec<String>> {
        let others: Vec<_> = others.iter().map(|name| der(name)).collect();
        let chain = clients(Vec::new())
            .unwrap()
            .chain(&der("sensor"), &others)?;
        let name = |der: &Vec<u8>| Certificate::from_der(der).unwrap().tbs_certificate.subject;
        Some(chain.iter().map(|der| name(der).to_string()).collect())
    }

    #[test]
    fn the_chain_is_sorted_and_leaves_out_unrelated_certificates() {
        let whole = ["CN=sensor", "CN=line", "CN=plant", "CN=root"].map(String::from);
        for others in [
            &["line", "plant"][..],
            &["plant", "line"],
            &["office", "line", "plant"],
            &["line", "plant", "stranger"],
            &["line", "line", "plant", "root"],
        ] {
            assert_eq!(chain_with(others).unwrap(), whole, "{others:?}");
        }
    }

    #[test]
    fn too_many_certificates_are_refused_before_verification() {
        assert_eq!(
            chain_with(&["line", "plant", "office", "office", "office", "office"]),
            None
        );
    }

    #[test]
    fn the_error_for_a_file_without_a_crl_names_the_file() {
        let error = clients(vec![fixture("plant")]).err().unwrap().to_string();
        assert!(
            error.ends_with("plant.pem holds no list of revoked certificates (CRL) in PEM form"),
            "{error}"
        );
    }
}
