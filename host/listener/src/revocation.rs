//! Verifies certificates of clients: their chain, and that no list (CRL) revokes one of them.
//!
//! webpki verifies the chain. It would check a certificate against only the first list with the
//! name of its issuer, but there may be several: older and newer ones, and those of another key
//! with the same name. So this module checks the lists. A certificate must never be accepted if any
//! list that its issuer signed revokes it. The order of the lists must not matter.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{
    CertificateDer, SignatureVerificationAlgorithm, SubjectPublicKeyInfoDer, TrustAnchor, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    SignatureScheme,
};
use webpki::{
    Cert, CertRevocationList, EndEntityCert, KeyUsage, OwnedCertRevocationList, RawPublicKeyEntity,
    VerifiedPath,
};
use x509_cert::Certificate;
use x509_cert::der::asn1::{AnyRef, BitStringRef};
use x509_cert::der::{Decode, Encode, Reader, SliceReader, Tag};
use x509_cert::ext::pkix::name::{DistributionPointName, GeneralName};
use x509_cert::ext::pkix::{self, CrlDistributionPoints, IssuingDistributionPoint};
use x509_cert::name::Name;

/// Keys whose verdict a list remembers. An authority has one key, or two while it changes its key.
const VERDICTS_MAX: usize = 16;

/// Accepts the chains that another verifier accepts, if no list revokes one of their certificates.
#[derive(Debug)]
pub(super) struct Verifier {
    /// Knows no lists.
    chains: Arc<dyn ClientCertVerifier>,
    roots: Arc<RootCertStore>,
    lists: Vec<RevocationList>,
}

/// A list of the certificates that one authority has revoked.
#[derive(Debug)]
pub(super) struct RevocationList {
    content: CertRevocationList<'static>,
    /// The bytes that the authority signed.
    signed: Box<[u8]>,
    algorithm: Box<[u8]>,
    signature: Box<[u8]>,
    /// Whether a trusted authority has signed it.
    is_trusted: bool,
    /// Whether each of these keys has signed it, the oldest verdict first. A verification hashes
    /// the whole list, so it must not happen at each handshake. Only keys of authorities whose
    /// certificates are verified may be added: a client could displace the others otherwise.
    verdicts: Mutex<VecDeque<(SubjectPublicKeyInfoDer<'static>, bool)>>,
}

impl Verifier {
    /// `chains` must trust `roots`. Without a list, no certificate is checked for revocation.
    pub(super) fn new(
        chains: Arc<dyn ClientCertVerifier>,
        roots: Arc<RootCertStore>,
        lists: Vec<RevocationList>,
    ) -> Self {
        Self {
            chains,
            roots,
            lists,
        }
    }

    /// Checks each certificate of a chain against the lists of its issuer.
    fn check(&self, path: &VerifiedPath<'_>) -> Result<(), webpki::Error> {
        let own: &Cert<'_> = path.end_entity();
        let chain: Vec<&Cert<'_>> = [own]
            .into_iter()
            .chain(path.intermediate_certificates())
            .collect();
        for (index, certificate) in chain.iter().enumerate() {
            let key = match chain.get(index + 1) {
                Some(issuer) if may_sign_lists(issuer) => issuer.subject_public_key_info(),
                // Its lists do not count.
                Some(_) => return Err(webpki::Error::IssuerNotCrlSigner),
                None => key_of(path.anchor()).ok_or(webpki::Error::BadDer)?,
            };
            let is_authority = index > 0;
            self.check_one(certificate, &key, is_authority)?;
        }
        Ok(())
    }

    fn check_one(
        &self,
        certificate: &Cert<'_>,
        issuer: &SubjectPublicKeyInfoDer<'_>,
        is_authority: bool,
    ) -> Result<(), webpki::Error> {
        let mut is_covered = false;
        for list in &self.lists {
            let is_of_issuer =
                list.content.issuer() == certificate.issuer() && list.is_signed_by(issuer);
            if !is_of_issuer {
                continue;
            }
            if list.content.find_serial(certificate.serial())?.is_some() {
                return Err(webpki::Error::CertRevoked);
            }
            is_covered = is_covered || list.covers(certificate, is_authority);
        }
        match is_covered {
            true => Ok(()),
            false => Err(webpki::Error::UnknownRevocationStatus),
        }
    }
}

impl ClientCertVerifier for Verifier {
    fn client_auth_mandatory(&self) -> bool {
        self.chains.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chains.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        // The errors of this verifier name the reason.
        let verified = self.chains.verify_client_cert(own, others, now)?;
        if self.lists.is_empty() {
            return Ok(verified);
        }
        let own = EndEntityCert::try_from(own).map_err(|_| CertificateError::BadEncoding)?;
        // webpki tries other chains if this check refuses one.
        let checked = own.verify_for_usage(
            algorithms(),
            &self.roots.roots,
            others,
            now,
            KeyUsage::client_auth(),
            None,
            Some(&|path| self.check(path)),
        );
        match checked {
            Ok(_) => Ok(verified),
            Err(webpki::Error::CertRevoked) => Err(CertificateError::Revoked.into()),
            Err(_) => Err(CertificateError::UnknownRevocationStatus.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

impl RevocationList {
    /// Reads a list, and checks whether one of `roots` has signed it. Fails if the DER is invalid.
    pub(super) fn read(der: &[u8], roots: &RootCertStore) -> Result<Self, webpki::Error> {
        let content = OwnedCertRevocationList::from_der(der)?;
        let (signed, algorithm, signature) = parts(der).map_err(|_| webpki::Error::BadDer)?;
        let mut list = Self {
            content: content.into(),
            signed: signed.into(),
            algorithm: algorithm.into(),
            signature: signature.into(),
            is_trusted: false,
            verdicts: Mutex::default(),
        };
        let named = roots.roots.iter().filter(|it| list.names(it));
        let is_trusted = named.filter_map(key_of).any(|it| list.is_signed_by(&it));
        list.is_trusted = is_trusted;
        Ok(list)
    }

    pub(super) fn is_trusted(&self) -> bool {
        self.is_trusted
    }

    /// Whether one of these authorities has the name of its issuer.
    pub(super) fn names_any(&self, roots: &RootCertStore) -> bool {
        roots.roots.iter().any(|it| self.names(it))
    }

    pub(super) fn issuer(&self) -> String {
        let name = AnyRef::new(Tag::Sequence, self.content.issuer());
        let name = name.and_then(|it| it.decode_as::<Name>());
        name.map_or_else(|_| "an unreadable name".to_owned(), |it| it.to_string())
    }

    fn names(&self, authority: &TrustAnchor<'_>) -> bool {
        self.content.issuer() == &authority.subject[..]
    }

    /// Whether this key of a verified authority has signed it.
    fn is_signed_by(&self, key: &SubjectPublicKeyInfoDer<'_>) -> bool {
        // A panic under this lock leaves whole entries.
        let mut verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        let known = verdicts.iter().find(|(of, _)| of == key);
        if let Some(is_signed) = known.map(|(_, is_signed)| *is_signed) {
            return is_signed;
        }
        // Under the lock, so that handshakes at the same time do not verify it several times.
        let is_signed = self.verify_signature(key);
        if verdicts.len() >= VERDICTS_MAX {
            verdicts.pop_front();
        }
        verdicts.push_back((key.clone().into_owned(), is_signed));
        is_signed
    }

    fn verify_signature(&self, key: &SubjectPublicKeyInfoDer<'_>) -> bool {
        #[cfg(test)]
        tests::VERIFICATIONS.set(tests::VERIFICATIONS.get() + 1);
        let Ok(key) = RawPublicKeyEntity::try_from(key) else {
            return false;
        };
        let mut algorithms = algorithms()
            .iter()
            .filter(|it| it.signature_alg_id()[..] == self.algorithm[..]);
        algorithms.any(|it| {
            let verified = key.verify_signature(*it, &self.signed, &self.signature);
            verified.is_ok()
        })
    }

    /// Whether the list would contain this certificate of its issuer if it were revoked (RFC 5280
    /// section 5.2.5). Such a list may be for the certificates of authorities only, or for those
    /// that name one of its addresses.
    fn covers(&self, certificate: &Cert<'_>, is_authority: bool) -> bool {
        let Some(scope) = self.content.issuing_distribution_point() else {
            return true;
        };
        let (Ok(scope), Ok(certificate)) = (
            IssuingDistributionPoint::from_der(scope),
            Certificate::from_der(&certificate.der()),
        ) else {
            return false;
        };
        let is_of_other_kind = match is_authority {
            true => scope.only_contains_user_certs,
            false => scope.only_contains_ca_certs,
        };
        if is_of_other_kind {
            return false;
        }
        let addresses: Vec<_> = uris(scope.distribution_point.as_ref()).collect();
        let points = certificate.tbs_certificate.get::<CrlDistributionPoints>();
        points.is_ok_and(|points| {
            points.is_none_or(|(_, points)| {
                // Others are for some reasons of revocation only, or have another issuer.
                let whole =
                    (points.0.iter()).filter(|it| it.reasons.is_none() && it.crl_issuer.is_none());
                whole
                    .flat_map(|it| uris(it.distribution_point.as_ref()))
                    .any(|it| addresses.contains(&it))
            })
        })
    }
}

fn uris(point: Option<&DistributionPointName>) -> impl Iterator<Item = &str> {
    let names = match point {
        Some(DistributionPointName::FullName(names)) => &names[..],
        _ => &[],
    };
    names.iter().filter_map(|name| match name {
        GeneralName::UniformResourceIdentifier(uri) => Some(uri.as_str()),
        _ => None,
    })
}

/// Whether the key usage of an authority allows it to sign lists.
fn may_sign_lists(authority: &Cert<'_>) -> bool {
    let Ok(authority) = Certificate::from_der(&authority.der()) else {
        return false;
    };
    let usage = authority.tbs_certificate.get::<pkix::KeyUsage>();
    usage.is_ok_and(|usage| usage.is_none_or(|(_, usage)| usage.crl_sign()))
}

/// The key of a trusted authority, which has it without the tag of the sequence.
fn key_of(authority: &TrustAnchor<'_>) -> Option<SubjectPublicKeyInfoDer<'static>> {
    let key = AnyRef::new(Tag::Sequence, &authority.subject_public_key_info).ok()?;
    key.to_der().ok().map(SubjectPublicKeyInfoDer::from)
}

/// The signed bytes of a list, the algorithm without its tag, and the signature.
fn parts(der: &[u8]) -> x509_cert::der::Result<(&[u8], &[u8], &[u8])> {
    SliceReader::new(der)?.sequence(|list| {
        let signed = list.tlv_bytes()?;
        let algorithm = AnyRef::decode(list)?.value();
        let signature = BitStringRef::decode(list)?.raw_bytes();
        Ok((signed, algorithm, signature))
    })
}

fn algorithms() -> &'static [&'static dyn SignatureVerificationAlgorithm] {
    let provider = rustls::crypto::ring::default_provider();
    provider.signature_verification_algorithms.all
}

#[cfg(test)]
mod tests;
