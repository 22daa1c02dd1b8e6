//! Warns of certificates that the other side of a connection will refuse: expired ones, ones that
//! are not valid yet, those of authorities, chains in the wrong order, and those of servers without
//! a name or for another purpose. Warns also of files that other accounts can change or must not
//! read.
//!
//! They never fail a start, since clients without TLS could still be served, and an expired
//! certificate may be replaced while the store runs.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use statehouse_link::tls;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::oid::db::rfc5280::ID_KP_SERVER_AUTH;
use x509_cert::ext::pkix::{BasicConstraints, ExtendedKeyUsage, SubjectAltName};

use super::tls::is_issued_by;
use jiff::Timestamp;
use statehouse_config::TlsFiles;
use statehouse_files::modes;

/// From which time before its end on a certificate is reported.
const EXPIRES_SOON: Duration = Duration::from_secs(7 * 86_400);

/// Logs a warning for each problem of the certificates of the listeners.
pub fn warn_of_files(files: &TlsFiles) {
    let mut all = CertificateFiles::default();
    all.add(files);
    all.warn();
}

/// Files of certificates, whose problems are warnings.
#[derive(Clone, Debug, Default)]
pub struct CertificateFiles {
    /// Each holds a certificate, and then those of its issuers.
    pub chains: Vec<PathBuf>,
    /// Each holds certificates of authorities.
    pub authorities: Vec<PathBuf>,
    /// Those of the chains that begin with the certificate of a server.
    servers: Vec<PathBuf>,
    /// Each holds a private key.
    keys: Vec<PathBuf>,
}

impl CertificateFiles {
    /// Adds the files of listeners.
    pub fn add(&mut self, files: &TlsFiles) {
        self.chains.push(files.certificate.clone());
        self.servers.push(files.certificate.clone());
        self.keys.push(files.key.clone());
        self.authorities.extend(files.client_ca.clone());
    }

    /// Logs a warning for each problem at present, and for each file with a wrong mode.
    pub fn warn(&self) {
        for problem in self.problems(SystemTime::now()) {
            tracing::warn!("{problem}");
        }
        for problem in self.exposed() {
            tracing::warn!("{problem}");
        }
    }

    /// A warning for each file that other accounts can change or must not read.
    fn exposed(&self) -> impl Iterator<Item = String> {
        let authorities = self.authorities.iter();
        let writable = authorities.filter_map(|it| modes::writable(it, "add an authority"));
        let keys = self.keys.iter();
        let readable = keys.filter_map(|it| modes::readable(it, "pretend to be this server"));
        writable.chain(readable)
    }

    /// Reads the files, and returns each problem at the time `now`, with the name of its file. A
    /// file that cannot be read is reported when it is used.
    #[must_use]
    pub fn problems(&self, now: SystemTime) -> Vec<String> {
        let read = |path: &PathBuf| tls::certificates(path).unwrap_or_default();
        let chains = self.chains.iter().map(|it| (it, of_chain(&read(it), now)));
        let servers = self.servers.iter().map(|it| {
            let own = read(it).first().map(of_server);
            (it, own.unwrap_or_default())
        });
        let authorities = self.authorities.iter();
        let authorities = authorities.map(|it| (it, of_authorities(&read(it), now)));
        let mut named = Vec::new();
        for (path, problems) in chains.chain(servers).chain(authorities) {
            let problems = problems.iter();
            named.extend(problems.map(|it| format!("{}: {it}", path.display())));
        }
        named
    }
}

/// The problem if none of the authorities is valid. Bundles hold some old ones.
fn of_authorities(authorities: &[CertificateDer<'_>], now: SystemTime) -> Vec<String> {
    let problems = authorities.iter().filter_map(|it| invalid(it, now));
    let problems: Vec<String> = problems.collect();
    match problems.first() {
        Some(first) if problems.len() == authorities.len() => {
            vec![format!("no certificate in it is valid now: {first}")]
        }
        _ => Vec::new(),
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
            "the certificate of {name} expired at {}: programs that verify it refuse the connection. Replace the file",
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

/// Why programs that verify the name of a server, such as `statehouse`, refuse this certificate. An
/// extension that cannot be decoded is not judged.
fn of_server(der: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = Certificate::from_der(der) else {
        return Vec::new();
    };
    let certificate = &certificate.tbs_certificate;
    let name = &certificate.subject;
    let mut problems = Vec::new();
    if let Ok(None) = certificate.get::<SubjectAltName>() {
        problems.push(format!(
            "the certificate of {name} has no subject alternative name, and most programs refuse it for a server: issue it with `subjectAltName=DNS:NAME`, or `IP:ADDRESS`"
        ));
    }
    if let Ok(Some((_, ExtendedKeyUsage(uses)))) = certificate.get()
        && !uses.contains(&ID_KP_SERVER_AUTH)
    {
        problems.push(format!(
            "the certificate of {name} is not for a server, so programs that verify it refuse the connection: issue it with `extendedKeyUsage=serverAuth`"
        ));
    }
    problems
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
    use statehouse_files::watch::Reloads;

    use super::*;
    use crate::tls::tests::fixture;

    fn chain(names: &[&str]) -> Vec<CertificateDer<'static>> {
        let read = |name: &&str| tls::certificates(&fixture(name)).unwrap();
        names.iter().flat_map(read).collect()
    }

    #[track_caller]
    fn assert_one(problems: &[String], expected: Option<&str>) {
        let count = usize::from(expected.is_some());
        assert_eq!(problems.len(), count, "{problems:?}");
        let says = expected.unwrap_or_default();
        assert!(problems.concat().contains(says), "{problems:?}");
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
            assert_one(&of_chain(&chain, now), expected);
        }
    }

    /// Regression: a store that ran for months did not warn before its certificate expired.
    #[test]
    fn certificate_that_expires_is_reported_once_a_day() {
        let (_, to) = validity(&Certificate::from_der(&chain(&["sensor"])[0]).unwrap());
        let files = CertificateFiles {
            chains: vec![fixture("sensor")],
            ..CertificateFiles::default()
        };
        let mut reloads = Reloads::default();
        reloads.warn_daily(move |now| files.problems(now));
        let hour = Duration::from_secs(3_600);
        for (now, expected) in [
            (to - 8 * 24 * hour, None),
            (to - 6 * 24 * hour, Some("expires at")),
            (to - 5 * 24 * hour - hour, None),
            (to - 5 * 24 * hour, Some("expires at")),
            (to + hour, Some("CN=sensor expired at")),
        ] {
            assert_one(&reloads.due_warnings(now), expected);
        }
    }

    #[test]
    fn authorities_are_reported_if_none_of_them_is_valid() {
        let (_, to) = validity(&Certificate::from_der(&chain(&["root"])[0]).unwrap());
        let files = CertificateFiles {
            authorities: vec![fixture("root")],
            ..CertificateFiles::default()
        };
        let day = Duration::from_secs(86_400);
        assert_eq!(files.problems(to - day), [""; 0]);
        let problems = files.problems(to + day).concat();
        assert!(
            problems.contains("no certificate in it is valid"),
            "{problems}"
        );
    }

    /// Regression: a check accepted certificates that each client with rustls refuses.
    #[test]
    fn server_certificates_without_name_or_purpose_are_reported() {
        use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let issue = |names: &[String], uses: &[rcgen::ExtendedKeyUsagePurpose]| {
            let mut params = rcgen::CertificateParams::new(names).unwrap();
            params.extended_key_usages = uses.to_vec();
            let key = rcgen::KeyPair::generate().unwrap();
            params.self_signed(&key).unwrap().der().clone()
        };
        let names = ["gateway".to_owned()];
        let cases: [(CertificateDer<'_>, &[&str]); 5] = [
            (issue(&names, &[]), &[]),
            (issue(&names, &[ClientAuth, ServerAuth]), &[]),
            (issue(&names, &[ClientAuth]), &["is not for a server"]),
            (issue(&[], &[]), &["has no subject alternative name"]),
            (
                issue(&[], &[ClientAuth]),
                &["has no subject alternative name", "is not for a server"],
            ),
        ];
        for (der, expected) in cases {
            let problems = of_server(&der);
            assert_eq!(problems.len(), expected.len(), "{problems:?}");
            let mut both = problems.iter().zip(expected);
            assert!(
                both.all(|(found, says)| found.contains(says)),
                "{problems:?}"
            );
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
