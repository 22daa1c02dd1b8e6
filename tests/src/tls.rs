//! Clients over TLS.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, ConfigBuilder, RootCertStore,
    client::WantsClientCert,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

/// Trusts the certificates that this one (PEM) has issued, and this one itself.
pub fn trusting(certificate: &Path) -> Arc<ClientConfig> {
    Arc::new(builder(certificate).with_no_client_auth())
}

/// The same for a client with a certificate and its key (PEM).
pub fn presenting(certificate: &Path, key: &Path, trusted: &Path) -> Arc<ClientConfig> {
    let own = CertificateDer::from_pem_file(certificate).unwrap();
    let key = PrivateKeyDer::from_pem_file(key).unwrap();
    let config = builder(trusted).with_client_auth_cert(vec![own], key);
    Arc::new(config.unwrap())
}

fn builder(trusted: &Path) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(trusted).unwrap();
    roots.add(certificate).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
}
