//! TLS connections with rustls and ring: reads certificate files and returns a configuration, or an
//! error that names the file.

use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, RootCertStore};

use crate::limits;

const MARK: &[u8] = "\u{feff}".as_bytes();

/// Why TLS cannot be set up, as a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, io::Error),
    /// A file is too large.
    #[error("{0} is larger than {max} bytes, so it is not a file of certificates", max = limits::PEM_FILE_BYTES_MAX)]
    Size(PathBuf),
    /// A file holds no certificates.
    #[error("{0} holds no certificate in PEM form")]
    NoCertificate(PathBuf),
    /// A file holds no key.
    #[error("{0} holds no unencrypted private key in PEM form")]
    NoKey(PathBuf),
    /// A certificate is invalid.
    #[error("{0} holds a certificate that cannot be used: {1}")]
    Certificate(PathBuf, rustls::Error),
    /// A certificate and a key do not match, or their kind is not supported.
    #[error("the certificate {0} cannot be used with its key: {why}", why = pair_reason(.1))]
    Pair(PathBuf, rustls::Error),
    /// The system has no root certificates.
    #[error(
        "this system has no root certificates to verify the server: configure a file with certificates"
    )]
    NoRoots,
    /// TLS cannot be set up.
    #[error("TLS cannot be used: {0}")]
    Setup(rustls::Error),
}

/// Why a certificate and a key cannot be used together, as the end of a sentence.
#[must_use]
pub fn pair_reason(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InconsistentKeys(_) => "the key belongs to another certificate".to_owned(),
        // Of the provider, for each key that it cannot use.
        rustls::Error::General(_) => "the key is damaged, or of a kind that is not supported: use ECDSA with P-256 or P-384, Ed25519, or RSA with 2048 to 4096 bits".to_owned(),
        error => match crate::describe_certificate(error) {
            Some(what) => format!("the certificate {what}"),
            None => error.to_string(),
        },
    }
}

/// Builds the configuration of a client. `ca` is a file with the certificates to trust; without it
/// the roots of the system are used. `own` is the client's certificate file and key file.
///
/// # Errors
/// If a file cannot be read or has the wrong content.
pub fn config(
    ca: Option<&Path>,
    own: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Setup)?
        .with_root_certificates(roots(ca)?);
    let Some((certificate, key)) = own else {
        return Ok(Arc::new(builder.with_no_client_auth()));
    };
    let chain = chain(certificate)?;
    let der = private_key(key)?;
    let config = builder
        .with_client_auth_cert(chain, der)
        .map_err(|error| TlsError::Pair(certificate.to_owned(), error))?;
    Ok(Arc::new(config))
}

fn roots(ca: Option<&Path>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let Some(path) = ca else {
        // Certificates that cannot be read do not prevent the use of the others.
        let found = rustls_native_certs::load_native_certs().certs;
        roots.add_parsable_certificates(found);
        return match roots.is_empty() {
            true => Err(TlsError::NoRoots),
            false => Ok(roots),
        };
    };
    for certificate in certificates(path)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::Certificate(path.to_owned(), error))?;
    }
    Ok(roots)
}

/// Reads the certificates of a PEM file, at least one.
///
/// # Errors
/// If the file cannot be read or holds none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = pem_file(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(TlsError::NoCertificate(path.to_owned())),
    }
}

/// Reads the certificates that one side of a connection presents: its own and those of its issuers.
///
/// # Errors
/// Those of [`certificates`], or one of them cannot be decoded, so that the other side would refuse
/// all of them.
pub fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = certificates(path)?;
    for certificate in &found {
        // Other errors are of certificates that only webpki refuses, such as those of version 1.
        let parsed = ParsedCertificate::try_from(certificate).map(|_| ());
        if let Err(error @ rustls::Error::InvalidCertificate(CertificateError::BadEncoding)) =
            parsed
        {
            return Err(TlsError::Certificate(path.to_owned(), error));
        }
    }
    Ok(found)
}

/// Reads the private key of a PEM file.
///
/// # Errors
/// If the file cannot be read or holds no unencrypted key.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&pem_file(path)?).map_err(|_| TlsError::NoKey(path.to_owned()))
}

/// The text of a PEM file without the byte order marks (U+FEFF in UTF-8) with which some editors
/// begin a file. The parser ignores the section behind a mark, so that a certificate or a list of
/// revoked ones would have no effect. In a file that was joined from several, a mark may begin any
/// line.
#[must_use]
pub fn without_marks(text: &[u8]) -> Vec<u8> {
    let mut rest = Vec::with_capacity(text.len());
    for line in text.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
        rest.extend_from_slice(line.strip_prefix(MARK).unwrap_or(line));
    }
    rest
}

/// Reads a PEM file, without its [marks](without_marks).
///
/// # Errors
/// If it cannot be read, is too large, or is a named pipe.
pub fn pem_file(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |error| TlsError::Read(path.to_owned(), error);
    // Opening a named pipe waits for a writer, which would stop all reloads of a store. The pipes
    // below /dev are those of a shell, as in `--ca <(command)`, and have one.
    let kind = std::fs::metadata(path).map_err(failed)?.file_type();
    if kind.is_fifo() && !path.starts_with("/dev") {
        return Err(failed(io::Error::other("it is a named pipe")));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(limits::PEM_FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > limits::PEM_FILE_BYTES_MAX {
        return Err(TlsError::Size(path.to_owned()));
    }
    Ok(without_marks(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
-----BEGIN CERTIFICATE-----
MIIBgzCCASmgAwIBAgIUVj6raaFmXqJQLU/GuhmmAdZ5yO4wCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFcGxhbnQwIBcNMjYxMTIyMDI0MDMyWhgPMjEyNjEwMjkwMjQw
MzJaMA8xDTALBgNVBAMMBGxpbmUwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARE
kTLMVqtE2jijFWTB0pOgX7U1hiVJpKKOqFlS3uAAGIHF1R174n/wm7GwNj04W6fJ
a1oTxek1o/IOREtkl8fCo2AwXjAPBgNVHRMBAf8EBTADAQH/MAsGA1UdDwQEAwIC
BDAdBgNVHQ4EFgQU5hsSThHLeWARmrtcUlOjbP8u+ScwHwYDVR0jBBgwFoAUsl0C
4WlvpbQg6Dvey1p1NezZSoYwCgYIKoZIzj0EAwIDSAAwRQIgeGGyjrWt9rvMIClp
SKe9ir/1ySX6k8AmSEQ7W246s9YCIQC4GDZLdbiYtwHsgpwUk/32Bqi0BI8ioVdg
HB/uiKppHQ==
-----END CERTIFICATE-----
";

    fn read_file<T>(bytes: impl AsRef<[u8]>, read: impl FnOnce(&Path) -> T) -> T {
        let path = std::env::temp_dir().join(format!("statehouse-pem-{:x}", crate::random()));
        std::fs::write(&path, bytes).unwrap();
        let result = read(&path);
        std::fs::remove_file(&path).unwrap();
        result
    }

    /// The error text for a file with these bytes.
    fn said(bytes: &[u8]) -> String {
        read_file(bytes, |path| {
            config(Some(path), None).unwrap_err().to_string()
        })
    }

    #[test]
    fn a_file_that_holds_no_certificate_is_named() {
        let none = "holds no certificate in PEM form";
        assert!(said(b"").ends_with(none));
        assert!(said(b"\x30\x82\x01\x00").ends_with(none));
        let broken = b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n";
        assert!(said(broken).ends_with(none));
        let nonsense = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
        assert!(said(nonsense).contains("cannot be used"));
    }

    #[test]
    fn each_certificate_of_a_chain_is_decoded() {
        let good = GOOD.to_owned();
        let nonsense = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
        for (text, count) in [
            (good.clone(), Some(1)),
            (good.clone() + &good, Some(2)),
            (good + nonsense, None),
        ] {
            assert_eq!(read_file(text, chain).ok().map(|it| it.len()), count);
        }
    }

    /// The parser skips a section behind a mark.
    #[test]
    fn byte_order_marks_hide_no_certificate() {
        for (text, count) in [
            (format!("\u{feff}{GOOD}"), 1),
            (format!("\u{feff}{GOOD}{GOOD}"), 2),
            (format!("{GOOD}\u{feff}{GOOD}"), 2),
            (format!("# Wärme\r\u{feff}{GOOD}"), 1),
        ] {
            let found = read_file(&text, certificates).unwrap();
            assert_eq!(found.len(), count, "{text}");
        }
        let (key, marked) = ("-----BEGIN", "\u{feff}-----BEGIN");
        assert_eq!(without_marks(marked.as_bytes()), key.as_bytes());
        // Within a line it is a character of the text.
        let within = "# \u{feff}\n".as_bytes();
        assert_eq!(without_marks(within), within);
    }

    #[test]
    fn unusable_keys_are_described() {
        let general = rustls::Error::General("failed to parse private key".to_owned());
        let error = TlsError::Pair("a.crt".into(), general).to_string();
        let says =
            "its key: the key is damaged, or of a kind that is not supported: use ECDSA with P-256";
        assert!(error.contains(says), "{error}");
        let mismatch = rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch);
        let error = TlsError::Pair("a.crt".into(), mismatch).to_string();
        assert!(error.ends_with("belongs to another certificate"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = config(Some(Path::new("/none/such.pem")), None).unwrap_err();
        assert!(error.to_string().starts_with("cannot read /none/such.pem:"));
    }

    /// A shell passes the output of a command so: `--ca <(command)`.
    #[test]
    fn pipe_of_a_shell_is_read() {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(GOOD.as_bytes()).unwrap();
        drop(writer);
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        assert_eq!(certificates(Path::new(&path)).unwrap().len(), 1);
    }

    #[test]
    fn a_file_of_another_kind_is_not_read_whole() {
        let bytes = usize::try_from(limits::PEM_FILE_BYTES_MAX).unwrap() + 1;
        assert!(said(&vec![b'x'; bytes]).contains("is larger than"));
    }
}
