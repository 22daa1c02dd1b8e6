//! Certificate authorities, certificates and revocation lists for tests, in a temporary directory.

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
use statehouse_tests::server::own_address;

/// The files of a certificate and its key.
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// A certificate authority, which writes its certificates into a directory.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: PathBuf,
    /// The file of its own certificate.
    pub(crate) certificate: PathBuf,
}

impl Authority {
    /// Creates an authority, and writes its certificate NAME.crt into the directory.
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

    /// Issues a certificate for a server on loopback, also at an address of this process.
    pub(crate) fn server(&self, name: &str) -> Pair {
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let addresses = ["127.0.0.1", "::1"].map(|it| it.parse::<IpAddr>().unwrap());
        let addresses = addresses.into_iter().chain([own_address().ip()]);
        let addresses = addresses.map(SanType::IpAddress);
        params.subject_alt_names.extend(addresses);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(name, params)
    }

    /// Issues a certificate for a client.
    pub(crate) fn client(&self, name: &str, serial: u64) -> Pair {
        self.client_until(name, serial, 2100)
    }

    /// Issues a certificate for a client, which expires at the beginning of this year.
    pub(crate) fn client_until(&self, name: &str, serial: u64, year: i32) -> Pair {
        let mut params = CertificateParams::new([]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = Some(SerialNumber::from(serial));
        params.not_after = date_time_ymd(year, 1, 1);
        self.issue(name, params)
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

    /// Writes a revocation list of these serial numbers.
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
