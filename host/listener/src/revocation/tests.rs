use std::cell::Cell;
use std::fs;
use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    CrlDistributionPoint, CrlIssuingDistributionPoint, CrlScope, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use statehouse_config::TlsFiles;
use tempfile::TempDir;

use super::*;
use crate::tls::{Clients, TlsError};

type Authority = CertifiedIssuer<'static, KeyPair>;

thread_local! {
    /// The verifications of signatures of lists on this thread.
    pub(super) static VERIFICATIONS: Cell<usize> = const { Cell::new(0) };
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new([]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

fn authority_params(name: &str, usages: &[KeyUsagePurpose]) -> CertificateParams {
    let mut params = params(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = usages.to_vec();
    params
}

const BOTH: [KeyUsagePurpose; 2] = [KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];

fn root(name: &str) -> Authority {
    let key = KeyPair::generate().unwrap();
    CertifiedIssuer::self_signed(authority_params(name, &BOTH), key).unwrap()
}

/// An authority below the root, with the serial number 20.
fn intermediate(root: &Authority, usages: &[KeyUsagePurpose]) -> Authority {
    let mut params = authority_params("line", usages);
    params.serial_number = Some(SerialNumber::from(20));
    CertifiedIssuer::signed_by(params, KeyPair::generate().unwrap(), root).unwrap()
}

fn client(by: &Authority, serial: u64) -> CertificateDer<'static> {
    client_with(by, serial, None)
}

/// A certificate of a client that names this address of a list.
fn client_with(by: &Authority, serial: u64, address: Option<&str>) -> CertificateDer<'static> {
    let mut params = params("client");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.serial_number = Some(SerialNumber::from(serial));
    params.crl_distribution_points = address
        .iter()
        .map(|it| CrlDistributionPoint {
            uris: vec![(*it).to_owned()],
        })
        .collect();
    let key = KeyPair::generate().unwrap();
    params.signed_by(&key, by).unwrap().der().clone()
}

/// A list in PEM form.
fn list(by: &Authority, serials: &[u64]) -> String {
    scoped_list(by, serials, None)
}

fn scoped_list(by: &Authority, serials: &[u64], scope: Option<(&str, Option<CrlScope>)>) -> String {
    let revoked = |serial: &u64| RevokedCertParams {
        serial_number: SerialNumber::from(*serial),
        revocation_time: date_time_ymd(2024, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let scope = scope.map(|(address, scope)| CrlIssuingDistributionPoint {
        distribution_point: CrlDistributionPoint {
            uris: vec![address.to_owned()],
        },
        scope,
    });
    let list = CertificateRevocationListParams {
        this_update: date_time_ymd(2024, 1, 1),
        next_update: date_time_ymd(2024, 1, 2),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: scope,
        revoked_certs: serials.iter().map(revoked).collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(by).unwrap().pem().unwrap()
}

/// Trusts these authorities. Each item of `lists` is a file.
fn clients(roots: &[&Authority], lists: &[String]) -> Result<Clients, TlsError> {
    let directory = TempDir::new().unwrap();
    let write = |name: String, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let pem: String = roots.iter().map(|it| it.pem()).collect();
    let ca = write("ca.pem".to_owned(), &pem);
    let lists = lists.iter().enumerate();
    let files = TlsFiles {
        certificate: PathBuf::new(),
        key: PathBuf::new(),
        client_ca: None,
        client_crls: lists
            .map(|(index, list)| write(format!("{index}.crl"), list))
            .collect(),
        client_required: true,
    };
    Clients::load(&ca, &files)
}

fn verdict(
    clients: &Clients,
    own: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
) -> Result<(), Error> {
    let verified = clients
        .verifier
        .verify_client_cert(own, others, UnixTime::now());
    verified.map(|_| ())
}

fn revoked() -> Result<(), Error> {
    Err(CertificateError::Revoked.into())
}

fn unknown() -> Result<(), Error> {
    Err(CertificateError::UnknownRevocationStatus.into())
}

/// Regression: only the first list of an authority counted.
#[test]
fn every_list_of_an_authority_counts_in_any_order() {
    let plant = root("plant");
    let (old, new) = (list(&plant, &[5]), list(&plant, &[5, 7]));
    let other = list(&plant, &[8]);
    let (good, bad) = (client(&plant, 6), client(&plant, 7));
    let orders = [
        vec![old.clone(), new.clone()],
        vec![new.clone(), old.clone()],
        vec![old.clone() + &new],
        vec![new.clone() + &old],
        vec![old, other.clone(), new],
    ];
    for lists in &orders {
        let clients = clients(&[&plant], lists).unwrap();
        assert_eq!(verdict(&clients, &bad, &[]), revoked());
        assert_eq!(verdict(&clients, &good, &[]), Ok(()));
    }
    let with_other = clients(&[&plant], &orders[4]).unwrap();
    assert_eq!(verdict(&with_other, &client(&plant, 8), &[]), revoked());
}

/// Regression: the list behind a mark had no effect.
#[test]
fn byte_order_marks_hide_no_list() {
    let plant = root("plant");
    let (old, new) = (list(&plant, &[5]), list(&plant, &[7]));
    let bad = client(&plant, 7);
    for text in [
        format!("\u{feff}{new}{old}"),
        format!("\u{feff}{old}\u{feff}{new}"),
        format!("\u{feff}{new}"),
    ] {
        let clients = clients(&[&plant], &[text]).unwrap();
        assert_eq!(verdict(&clients, &bad, &[]), revoked());
    }
}

/// Regression: clients of the authority whose list came second were refused (BadSignature).
#[test]
fn authorities_of_one_name_have_a_list_each() {
    let (before, after) = (root("plant"), root("plant"));
    let lists = [list(&before, &[7]), list(&after, &[8])];
    for lists in [lists.clone(), [lists[1].clone(), lists[0].clone()]] {
        let clients = clients(&[&before, &after], &lists).unwrap();
        for (by, serial, expected) in [
            (&before, 7, revoked()),
            (&before, 8, Ok(())),
            (&after, 7, Ok(())),
            (&after, 8, revoked()),
        ] {
            assert_eq!(verdict(&clients, &client(by, serial), &[]), expected);
        }
    }
    let only_one = clients(&[&before, &after], &lists[..1]).unwrap();
    assert_eq!(verdict(&only_one, &client(&after, 6), &[]), unknown());
}

#[test]
fn each_certificate_of_a_chain_needs_a_list_of_its_issuer() {
    let plant = root("plant");
    let line = intermediate(&plant, &BOTH);
    let others = [line.der().clone()];
    let of = |lists: &[String]| {
        let clients = clients(&[&plant], lists).unwrap();
        verdict(&clients, &client(&line, 7), &others)
    };
    assert_eq!(of(&[]), Ok(()));
    assert_eq!(of(&[list(&plant, &[7]), list(&line, &[6, 20])]), Ok(()));
    assert_eq!(of(&[list(&plant, &[7])]), unknown());
    assert_eq!(of(&[list(&plant, &[]), list(&line, &[7])]), revoked());
    assert_eq!(of(&[list(&plant, &[20]), list(&line, &[])]), revoked());
    assert_eq!(of(&[list(&line, &[]), list(&plant, &[20])]), revoked());
    let no_signer = intermediate(&plant, &[KeyUsagePurpose::KeyCertSign]);
    let clients = clients(&[&plant], &[list(&plant, &[]), list(&line, &[])]).unwrap();
    let own = client(&no_signer, 7);
    let verdict = verdict(&clients, &own, &[no_signer.der().clone()]);
    assert_eq!(verdict, unknown());
}

/// Regression: each client of an intermediate authority caused a verification of its whole list.
#[test]
fn signature_of_a_list_is_verified_once_for_each_key() {
    let plant = root("plant");
    let line = intermediate(&plant, &BOTH);
    let others = [line.der().clone()];
    let lists = [list(&plant, &[]), list(&line, &[8])];
    let of_line = clients(&[&plant], &lists).unwrap();
    VERIFICATIONS.set(0);
    for _ in 0..2 {
        assert_eq!(verdict(&of_line, &client(&line, 7), &others), Ok(()));
        assert_eq!(verdict(&of_line, &client(&line, 8), &others), revoked());
    }
    // That of the root was verified when it was read.
    assert_eq!(VERIFICATIONS.get(), 1);

    // A list with the name of an authority that another key has signed.
    let (before, after) = (root("plant"), root("plant"));
    let lists = [list(&before, &[]), list(&after, &[])];
    let of_both = clients(&[&before, &after], &lists).unwrap();
    let by_both = || {
        for by in [&before, &after] {
            assert_eq!(verdict(&of_both, &client(by, 7), &[]), Ok(()));
        }
        VERIFICATIONS.get()
    };
    assert_eq!(by_both(), by_both());
}

/// Otherwise many intermediate authorities with one name could fill the memory.
#[test]
fn list_remembers_a_bounded_number_of_keys() {
    let plant = root("plant");
    let der = CertificateRevocationListDer::from_pem_slice(list(&plant, &[]).as_bytes()).unwrap();
    let list = RevocationList::read(&der, &RootCertStore::empty()).unwrap();
    let key = |by: &Authority| {
        let certificate = Certificate::from_der(by.der()).unwrap();
        let key = certificate.tbs_certificate.subject_public_key_info;
        SubjectPublicKeyInfoDer::from(key.to_der().unwrap())
    };
    assert!(list.is_signed_by(&key(&plant)));
    for _ in 0..VERDICTS_MAX {
        assert!(!list.is_signed_by(&key(&root("plant"))));
    }
    assert_eq!(list.verdicts.lock().unwrap().len(), VERDICTS_MAX);
    assert!(list.is_signed_by(&key(&plant)));
}

#[test]
fn partial_list_counts_for_the_certificates_that_it_covers() {
    let plant = root("plant");
    let (here, there) = ("http://here/crl", "http://there/crl");
    let partial = |scope, address| scoped_list(&plant, &[7], Some((address, scope)));
    for (scope, address, covers) in [
        (None, here, true),
        (Some(CrlScope::UserCertsOnly), here, true),
        (Some(CrlScope::CaCertsOnly), here, false),
        (None, there, false),
    ] {
        let lists = [partial(scope, address)];
        let clients = clients(&[&plant], &lists).unwrap();
        let good = client_with(&plant, 6, Some(here));
        let expected = if covers { Ok(()) } else { unknown() };
        assert_eq!(verdict(&clients, &good, &[]), expected, "{address}");
        let bad = client_with(&plant, 7, Some(here));
        assert_eq!(verdict(&clients, &bad, &[]), revoked());
    }
    let lists = [
        partial(Some(CrlScope::CaCertsOnly), here),
        list(&plant, &[]),
    ];
    let clients = clients(&[&plant], &lists).unwrap();
    assert_eq!(verdict(&clients, &client(&plant, 6), &[]), Ok(()));
    assert_eq!(verdict(&clients, &client(&plant, 7), &[]), revoked());
}

/// Regression: such a list was taken, and locked out all clients.
#[test]
fn list_must_be_signed_by_an_authority_of_its_name() {
    let (plant, impostor, office) = (root("plant"), root("plant"), root("office"));
    let refused = |lists: &[String]| {
        let error = clients(&[&plant], lists).err().unwrap();
        error.to_string()
    };
    let good = list(&plant, &[]);
    let forged = refused(&[good.clone(), list(&impostor, &[7])]);
    assert!(
        forged.contains("1.crl holds a list") && forged.contains("CN=plant, but no authority"),
        "{forged}"
    );
    let other = refused(&[list(&office, &[7])]);
    assert!(other.contains("none of the lists"), "{other}");
    // It may be the list of an intermediate authority.
    assert!(clients(&[&plant], &[good, list(&office, &[7])]).is_ok());
}

/// Regression: the names did not fit into a handshake, which failed.
#[test]
fn very_many_names_of_authorities_are_not_sent() {
    let names = |count| {
        let roots = (0..count).map(|it| root(&format!("{it:0200}")));
        let roots: Vec<_> = roots.collect();
        let clients = clients(&roots.iter().collect::<Vec<_>>(), &[]).unwrap();
        assert_eq!(verdict(&clients, &client(&roots[0], 1), &[]), Ok(()));
        clients.verifier.root_hint_subjects().len()
    };
    assert_eq!(names(60), 60);
    assert_eq!(names(80), 0);
}
