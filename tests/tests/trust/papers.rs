//! Authorities, certificates and lists of revoked ones, made for a test and gone with it.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SanType, SerialNumber, date_time_ymd,
};

/// Where a certificate and its key are.
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// Somebody who issues certificates into a directory.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: PathBuf,
    /// Its own certificate.
    pub(crate) certificate: PathBuf,
}

/// A certificate as it is asked for.
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    /// The year at whose beginning it ends.
    pub(crate) until: i32,
    pub(crate) serial: u64,
}

impl Authority {
    /// Writes NAME.crt into the directory.
    pub(crate) fn new(directory: &Path, name: &str) -> Authority {
        let mut params = CertificateParams::new([]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        let certificate = directory.join(format!("{name}.crt"));
        fs::write(&certificate, issuer.pem()).unwrap();
        Authority {
            issuer,
            directory: directory.to_owned(),
            certificate,
        }
    }

    /// A certificate of a server on loopback.
    pub(crate) fn server(&self, name: &str) -> Pair {
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let addresses = ["127.0.0.1", "::1"].map(|it| it.parse::<IpAddr>().unwrap());
        let addresses = addresses.map(SanType::IpAddress);
        params.subject_alt_names.extend(addresses);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(name, params)
    }

    /// A certificate of a client with this common name.
    pub(crate) fn client(&self, wanted: &Wanted<'_>) -> Pair {
        let mut params = CertificateParams::new([]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = Some(SerialNumber::from(wanted.serial));
        params.not_after = date_time_ymd(wanted.until, 1, 1);
        self.issue(wanted.name, params)
    }

    fn issue(&self, name: &str, mut params: CertificateParams) -> Pair {
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let issued = params.signed_by(&key, &self.issuer).unwrap();
        let pair = Pair {
            certificate: self.directory.join(format!("{name}.crt")),
            key: self.directory.join(format!("{name}.key")),
        };
        fs::write(&pair.certificate, issued.pem()).unwrap();
        fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }

    /// Writes a list in which these are revoked.
    pub(crate) fn revoke(&self, path: &Path, serials: &[u64]) {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).unwrap();
        fs::write(path, list.pem().unwrap()).unwrap();
    }
}
