//! Warns of certificates that the other side of a connection will refuse: expired ones, ones that
//! are not valid yet, those of authorities, and chains in the wrong order.
//!
//! They never fail a start, since clients without TLS could still be served, and an expired
//! certificate may be replaced while the store runs.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use statehouse_link::tls;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::BasicConstraints;

use super::tls::is_issued_by;
use jiff::Timestamp;
use statehouse_config::TlsFiles;

/// From which time before its end on a certificate is reported.
const EXPIRES_SOON: Duration = Duration::from_secs(7 * 86_400);

/// Logs a warning for each problem of the certificates of the listeners.
pub fn warn_of_files(files: &TlsFiles) {
    warn_of_chain(&files.certificate);
    if let Some(ca) = &files.client_ca {
        warn_of_authorities(ca);
    }
}

/// Logs a warning for each problem of a file with a certificate and its issuers. A file that cannot
/// be read is reported when it is used.
pub fn warn_of_chain(path: &Path) {
    let chain = tls::certificates(path).unwrap_or_default();
    for problem in of_chain(&chain, SystemTime::now()) {
        tracing::warn!("{}: {problem}", path.display());
    }
}

/// Logs a warning if none of the authorities in a file is valid now. Bundles hold some old ones.
pub fn warn_of_authorities(path: &Path) {
    let authorities = tls::certificates(path).unwrap_or_default();
    let now = SystemTime::now();
    let mut problems = authorities.iter().filter_map(|it| invalid(it, now));
    let wrong: Vec<String> = problems.by_ref().collect();
    if let Some(first) = wrong.first().filter(|_| wrong.len() == authorities.len()) {
        tracing::warn!(
            "{}: no certificate in it is valid now: {first}",
            path.display()
        );
    }
}

fn of_chain(chain: &[CertificateDer<'_>], now: SystemTime) -> Vec<String> {
    let mut problems: Vec<String> = chain.iter().filter_map(|it| invalid(it, now)).collect();
    problems.extend(chain.first().and_then(|it| ends_soon(it, now)));
    problems.extend(chain.first().and_then(of_authority));
    if !chain
        .windows(2)
        .all(|pair| is_issued_by(&pair[0], &pair[1]))
    {
        problems.push(
            "the certificates are not in order, so some clients refuse them: the server's own comes first, and each other one issued the one before it".to_owned(),
        );
    }
    problems
}

/// Why a certificate is not valid at this time, if it is not.
fn invalid(der: &CertificateDer<'_>, now: SystemTime) -> Option<String> {
    let certificate = Certificate::from_der(der).ok()?;
    let (from, to) = validity(&certificate);
    let name = &certificate.tbs_certificate.subject;
    if now > to {
        return Some(format!(
            "the certificate of {name} expired at {}: clients that verify it refuse to connect. Replace the file",
            shown(to)
        ));
    }
    (now < from).then(|| {
        format!(
            "the certificate of {name} is valid only from {} on: set the clock, or replace the file",
            shown(from)
        )
    })
}

fn ends_soon(der: &CertificateDer<'_>, now: SystemTime) -> Option<String> {
    let certificate = Certificate::from_der(der).ok()?;
    let (_, to) = validity(&certificate);
    let left = to.duration_since(now).ok()?;
    (left < EXPIRES_SOON).then(|| {
        let name = &certificate.tbs_certificate.subject;
        format!(
            "the certificate of {name} expires at {}: renew it",
            shown(to)
        )
    })
}

/// Programs with rustls, such as `statehouse`, refuse a server or a client with the certificate of
/// an authority.
fn of_authority(der: &CertificateDer<'_>) -> Option<String> {
    let certificate = Certificate::from_der(der).ok()?;
    let constraints = certificate.tbs_certificate.get::<BasicConstraints>();
    let (_, constraints) = constraints.ok()??;
    constraints.ca.then(|| {
        let name = &certificate.tbs_certificate.subject;
        format!(
            "the certificate of {name} is that of an authority, and some programs refuse it for a server or a client: make one with `-addext basicConstraints=critical,CA:FALSE`"
        )
    })
}

fn validity(certificate: &Certificate) -> (SystemTime, SystemTime) {
    let validity = &certificate.tbs_certificate.validity;
    (
        validity.not_before.to_system_time(),
        validity.not_after.to_system_time(),
    )
}

fn shown(time: SystemTime) -> String {
    Timestamp::try_from(time).map_or_else(|_| "an unknown time".into(), |it| format!("{it:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(names: &[&str]) -> Vec<CertificateDer<'static>> {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fixtures");
        let read = |name: &&str| tls::certificates(&fixtures.join(format!("{name}.pem"))).unwrap();
        names.iter().flat_map(read).collect()
    }

    #[test]
    fn certificates_are_reported_before_during_and_after_their_time() {
        let chain = chain(&["sensor"]);
        let (from, to) = validity(&Certificate::from_der(&chain[0]).unwrap());
        let day = Duration::from_secs(86_400);
        for (now, expected) in [
            (from - day, Some("is valid only from")),
            (from + day, None),
            (to - day, Some("expires at")),
            (to + day, Some("CN=sensor expired at")),
        ] {
            let problems = of_chain(&chain, now);
            assert_eq!(
                problems.len(),
                usize::from(expected.is_some()),
                "{problems:?}"
            );
            let found = problems.concat();
            assert!(found.contains(expected.unwrap_or_default()), "{found}");
        }
    }

    #[test]
    fn a_chain_must_be_in_order() {
        assert!(
            of_chain(&chain(&["plant"]), SystemTime::now())
                .concat()
                .contains("CA:FALSE")
        );
        let ordered = chain(&["sensor", "line", "plant"]);
        let (from, _) = validity(&Certificate::from_der(&ordered[0]).unwrap());
        let now = from + Duration::from_secs(86_400);
        assert_eq!(of_chain(&ordered, now), [""; 0]);
        let problems = of_chain(&chain(&["sensor", "plant", "line"]), now);
        assert!(problems.concat().contains("not in order"), "{problems:?}");
    }
}
