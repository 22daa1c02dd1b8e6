//! The settings of a host in a cluster: where its log is, how other hosts reach it, and how reads
//! are protected.
//!
//! Combines flags with the same keys of the file and yields a [`ClusterConfig`] of checked values,
//! or an error that names the settings to change. It opens no file.

use std::net::{SocketAddr, SocketAddrV6};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use statehouse_cluster::{Options, Reads, Sizes, check_cluster_name};

use super::layer::settings;
use super::url::password_variable;
use super::values;
use super::values::socket_address;
use super::{ConfigError, Flags, Secret, Span, read_password, time};
use crate::limits;

/// Environment variable with the password at etcd, as an alternative to a file.
const PASSWORD: &str = "STATEHOUSE_CLUSTER_PASSWORD";

settings! {
    /// The settings of `serve` for a cluster.
    #[command(next_help_heading = "Cluster")]
    pub struct ClusterFlags {
        /// Form one store with other hosts: the addresses of the etcd servers that keep its log,
        /// such as https://etcd1:2379; may be given more than once
        #[arg(
            long,
            value_name = "URL",
            env = "STATEHOUSE_CLUSTER",
            value_delimiter = ','
        )]
        pub cluster: Vec<String>,

        /// The name of the cluster, as in `statehouse cluster init` [default: statehouse]
        #[arg(long, value_name = "NAME", env = "STATEHOUSE_CLUSTER_NAME")]
        pub cluster_name: Option<String>,

        /// The name of this host, unique in its cluster [default: the machine's host name]
        #[arg(long, value_name = "NAME", env = "STATEHOUSE_NAME")]
        pub name: Option<String>,

        /// Where this host listens for the other hosts of its cluster
        #[arg(long, value_name = "ADDR:PORT", env = "STATEHOUSE_CLUSTER_LISTEN")]
        pub cluster_listen: Option<ClusterListen>,

        /// The address at which other hosts reach --cluster-listen, if they need another one
        #[arg(long, value_name = "HOST:PORT", env = "STATEHOUSE_CLUSTER_ADDRESS")]
        pub cluster_address: Option<String>,

        /// CA certificates (PEM) that the certificates of the etcd servers are verified against
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_CA")]
        pub cluster_ca: Option<PathBuf>,

        /// The certificate (PEM) of this host at etcd, with --cluster-key
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_CERT")]
        pub cluster_cert: Option<PathBuf>,

        /// The private key of --cluster-cert (PEM)
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_KEY")]
        pub cluster_key: Option<PathBuf>,

        /// The user of this host at etcd
        #[arg(long, value_name = "NAME", env = "STATEHOUSE_CLUSTER_USER")]
        pub cluster_user: Option<String>,

        /// A file with the password of --cluster-user, which is read again at each login [default:
        /// STATEHOUSE_CLUSTER_PASSWORD]
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_PASSWORD_FILE")]
        pub cluster_password_file: Option<PathBuf>,

        /// How long a leader answers reads after its last write. After the loss of the leader, the
        /// next one waits this long; a lease that is shorter than a pause of the network or of the
        /// machine makes reads slower [default: 2s]
        #[arg(long, value_name = "TIME", env = "STATEHOUSE_CLUSTER_LEASE")]
        pub cluster_lease: Option<Span>,

        /// How reads are protected from a leader that was replaced [default: lease]
        #[arg(long, value_name = "HOW", env = "STATEHOUSE_CLUSTER_READS")]
        pub cluster_reads: Option<ClusterReads>,

        /// Whether the leader compacts etcd [default: on]
        #[arg(long, value_name = "WHEN", env = "STATEHOUSE_CLUSTER_COMPACT")]
        pub cluster_compact: Option<Compact>,

        /// The --quota-backend-bytes of the etcd servers. Writes that need room are refused before
        /// the next snapshot would not fit [default: 2147483648]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_CLUSTER_QUOTA")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub cluster_quota: Option<NonZeroU64>,
    }
}

/// The settings of a host in a cluster.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// How to reach etcd.
    pub etcd: EtcdConfig,
    /// The name of this host.
    pub host: String,
    /// Where this host listens for other hosts.
    pub listen: SocketAddr,
    /// The address at which other hosts reach this one. None: the address of the listener.
    pub address: Option<String>,
    /// The length of a lease.
    pub lease: Duration,
    /// How reads are protected.
    pub reads: Reads,
    /// Whether the leader compacts etcd.
    pub compacts: bool,
    /// The quota of etcd in bytes.
    pub quota_bytes: u64,
}

/// How to reach the log of a cluster.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// The addresses of the servers.
    pub urls: Vec<String>,
    /// The name of the cluster.
    pub name: String,
    /// CA certificates of the servers, if they use TLS.
    pub ca: Option<PathBuf>,
    /// The certificate and private key of this host.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// The user at etcd, and where its password is.
    pub login: Option<(String, EtcdPassword)>,
}

/// Where the password of a user at etcd is.
#[derive(Clone, Debug)]
pub enum EtcdPassword {
    /// In a file, which may change.
    File(PathBuf),
    /// In the environment.
    Given(Secret),
}

impl EtcdPassword {
    /// Reads the password.
    pub fn read(&self) -> Result<String, ConfigError> {
        let Secret(password) = match self {
            Self::File(path) => read_password(path)?,
            Self::Given(password) => password.clone(),
        };
        Ok(password)
    }
}

/// An address to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterListen(pub SocketAddr);

impl std::str::FromStr for ClusterListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        socket_address(text).map(Self).ok_or_else(|| {
            let text = ConfigError::without_login(text);
            format!("`{text}` is not an address and port, such as 10.0.0.1:7883")
        })
    }
}

/// How reads are protected from a leader that was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClusterReads {
    /// By a lease: as fast as one host. Relies on the rates of the hosts' clocks
    Lease,
    /// By a write to the log for each group of reads. Relies on no clock, for machines that may be
    /// suspended
    Confirmed,
}

/// Whether the leader compacts etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compact {
    /// After each snapshot
    On,
    /// Never: the etcd servers compact by themselves
    Off,
}

/// Why the settings of a cluster are refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ClusterError {
    /// A setting of a cluster without one.
    #[error("{0} requires a cluster: add --cluster URL, or remove {0}")]
    WithoutCluster(&'static str),
    /// A setting that a cluster decides.
    #[error("{0} cannot be set in a cluster: {1}")]
    Decided(&'static str, &'static str),
    /// No address for other hosts.
    #[error(
        "the other hosts of the cluster need an address of this one: add --cluster-listen ADDR:PORT"
    )]
    Listen,
    /// An address that other hosts cannot use.
    #[error(
        "other hosts cannot connect to {0}: name an address of this machine with --cluster-listen, or add --cluster-address HOST:PORT"
    )]
    Address(SocketAddr),
    /// An address for other hosts that none can use.
    #[error(
        "cluster_address is `{0}`, which is no address for other hosts: write HOST:PORT, such as gw1.plant:7883, with the name or an address of this machine"
    )]
    OwnAddress(String),
    /// An address that is none of etcd.
    #[error(
        "`{0}` is not the address of an etcd server: write one with its port, such as http://etcd1:2379 or https://etcd1:2379"
    )]
    Url(String),
    /// A certificate without its key, or a key without its certificate.
    #[error(
        "cluster_cert and cluster_key belong together: give both or none of --cluster-cert and --cluster-key"
    )]
    HalfCertificate,
    /// Encrypted connections to etcd that are not verified.
    #[error(
        "`{0}` needs cluster_ca: add --cluster-ca FILE, the authority of the certificates of etcd"
    )]
    WithoutAuthority(String),
    /// Certificates for an unencrypted connection to etcd.
    #[error(
        "`{0}` is unencrypted, so it allows no certificates: write https://, or remove --cluster-ca, --cluster-cert and --cluster-key"
    )]
    CertificatesWithoutTls(String),
    /// A user without a password, or a password without a user.
    #[error(
        "cluster_user and its password belong together: give both or none. The password is in cluster_password_file or in STATEHOUSE_CLUSTER_PASSWORD"
    )]
    HalfLogin,
    /// A name or an address that the log cannot hold.
    #[error("{0}")]
    Name(String),
}

impl ClusterFlags {
    /// Why this build does not know a key of the file, if other builds do.
    pub(super) fn absent(_key: &str) -> Option<String> {
        None
    }

    /// How to reach the log.
    pub fn etcd(&self) -> Result<EtcdConfig, ClusterError> {
        let certificate = match (&self.cluster_cert, &self.cluster_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            _ => return Err(ClusterError::HalfCertificate),
        };
        let is_address = |url: &str| {
            let scheme = ["http://", "https://"];
            let rest = scheme.iter().find_map(|it| url.strip_prefix(it));
            rest.is_some_and(|it| has_port(it.trim_end_matches('/')))
        };
        if let Some(url) = self.cluster.iter().find(|it| !is_address(it)) {
            return Err(ClusterError::Url(ConfigError::without_login(url)));
        }
        let (encrypted, plain): (Vec<_>, Vec<_>) =
            (self.cluster.iter()).partition(|it| it.starts_with("https:"));
        let has_authority = self.cluster_ca.is_some();
        if let Some(&url) = encrypted.first().filter(|_| !has_authority) {
            return Err(ClusterError::WithoutAuthority(url.clone()));
        }
        let has_any = has_authority || certificate.is_some();
        if let Some(&url) = plain.first().filter(|_| has_any) {
            return Err(ClusterError::CertificatesWithoutTls(url.clone()));
        }
        let name = (self.cluster_name.clone()).unwrap_or_else(|| "statehouse".to_owned());
        check_cluster_name(&name).map_err(ClusterError::Name)?;
        Ok(EtcdConfig {
            urls: self.cluster.clone(),
            name,
            ca: self.cluster_ca.clone(),
            certificate,
            login: self.login()?,
        })
    }

    /// The user at etcd. A password file takes precedence over the environment.
    fn login(&self) -> Result<Option<(String, EtcdPassword)>, ClusterError> {
        let given = || password_variable(PASSWORD).map(EtcdPassword::Given);
        let file = self.cluster_password_file.clone().map(EtcdPassword::File);
        let password = file.or_else(given);
        match (self.cluster_user.clone(), password) {
            (None, None) => Ok(None),
            (Some(user), Some(password)) if !user.is_empty() => Ok(Some((user, password))),
            _ => Err(ClusterError::HalfLogin),
        }
    }

    /// The checked settings, or none if there is no cluster.
    fn load(self) -> Result<Option<ClusterConfig>, ConfigError> {
        if self.cluster.is_empty() {
            return match self.first_set() {
                Some(name) => Err(ClusterError::WithoutCluster(name).into()),
                None => Ok(None),
            };
        }
        let etcd = self.etcd()?;
        let ClusterListen(listen) = self.cluster_listen.ok_or(ClusterError::Listen)?;
        if self.cluster_address.is_none() && listen.ip().is_unspecified() {
            return Err(ClusterError::Address(listen).into());
        }
        if let Some(address) = self.cluster_address.as_ref().filter(|it| !is_usable(it)) {
            return Err(ClusterError::OwnAddress(ConfigError::without_login(address)).into());
        }
        let lease_ms = time(
            self.cluster_lease,
            2_000,
            ("cluster_lease", 200, "200ms", 60_000, "60s"),
        )?;
        let config = ClusterConfig {
            host: self.name.unwrap_or_else(machine_name),
            listen,
            address: self.cluster_address,
            lease: Duration::from_millis(lease_ms),
            reads: match self.cluster_reads {
                Some(ClusterReads::Confirmed) => Reads::Confirmed,
                Some(ClusterReads::Lease) | None => Reads::Lease,
            },
            compacts: self.cluster_compact != Some(Compact::Off),
            quota_bytes: (self.cluster_quota).map_or(Sizes::default().quota_bytes, NonZeroU64::get),
            etcd,
        };
        let address = config.listen.to_string();
        let checked = config.options(&address, Default::default()).check();
        checked.map_err(ClusterError::Name)?;
        Ok(Some(config))
    }
}

/// The first setting that a host in a cluster cannot choose, and the reason.
fn decided_by_cluster(settings: &Flags) -> Option<(&'static str, &'static str)> {
    let given = [
        (
            settings.storage.durability.is_some(),
            "durability",
            "a write is in the log of the cluster before its answer",
        ),
        (
            settings.foreign.broker.is_some(),
            "broker",
            "clients connect to the hosts of the cluster",
        ),
        (
            settings.policy.is_some(),
            "policy",
            "the log of the cluster names the policies; use `statehouse policy load` and `promote`",
        ),
    ];
    let mut given = given.into_iter().filter(|(is_given, ..)| *is_given);
    given.next().map(|(_, name, why)| (name, why))
}

impl ClusterConfig {
    /// The checked settings of a cluster and no others that a cluster decides, or none if there is
    /// no cluster.
    pub(super) fn load(settings: &Flags) -> Result<Option<Self>, ConfigError> {
        let cluster = settings.cluster.clone().load()?;
        if cluster.is_some()
            && let Some((name, why)) = decided_by_cluster(settings)
        {
            return Err(ClusterError::Decided(name, why).into());
        }
        Ok(cluster)
    }

    /// The options of a member with this address and process id.
    pub fn options(&self, address: &str, process: statehouse_cluster::Id) -> Options {
        let address = self.address.as_deref().unwrap_or(address);
        let mut options = Options::new(&self.etcd.name, &self.host, address, process);
        options.reads = self.reads;
        options.timing.lease = self.lease;
        options.timing.quiet = limits::CLUSTER_QUIET;
        options.compacts = self.compacts;
        options.sizes.quota_bytes = self.quota_bytes;
        options
    }
}

/// Whether this is `HOST:PORT`, with a port from 1 to 65535. An IPv6 address is in brackets.
fn has_port(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else {
        return false;
    };
    // A number may have a sign.
    let is_number = port.bytes().all(|it| it.is_ascii_digit());
    let is_port = is_number && port.parse::<u16>().is_ok_and(|it| it > 0);
    let is_name = |it: u8| it.is_ascii_alphanumeric() || b"-_.".contains(&it);
    let is_host = !host.is_empty() && host.bytes().all(is_name);
    is_port && (is_host || address.parse::<SocketAddrV6>().is_ok())
}

/// Whether other hosts can connect to this address, as far as it says.
fn is_usable(address: &str) -> bool {
    let ip = address.parse::<SocketAddr>().map(|it| it.ip());
    has_port(address) && !ip.is_ok_and(|it| it.is_unspecified())
}

/// The host name of the machine; empty if the system does not say.
fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> ClusterFlags {
        ClusterFlags {
            cluster: vec!["http://127.0.0.1:2379".into()],
            name: Some("gw1".into()),
            cluster_listen: Some(ClusterListen(([10, 0, 0, 1], 7883).into())),
            ..ClusterFlags::default()
        }
    }

    fn refused(flags: ClusterFlags) -> String {
        flags.load().unwrap_err().to_string()
    }

    #[test]
    fn a_cluster_needs_an_address_that_other_hosts_can_use() {
        let config = flags().load().unwrap().unwrap();
        assert_eq!(config.etcd.name, "statehouse");
        assert_eq!(config.lease, Duration::from_secs(2));
        assert!(config.compacts);
        let mut none = flags();
        none.cluster_listen = None;
        assert!(refused(none).contains("--cluster-listen"));
        let mut anywhere = flags();
        anywhere.cluster_listen = Some("0.0.0.0:7883".parse().unwrap());
        assert!(refused(anywhere.clone()).contains("--cluster-address"));
        let addressed = |address: &str| {
            let mut flags = anywhere.clone();
            flags.cluster_address = Some(address.into());
            flags.load()
        };
        for address in ["gw1.plant:7883", "10.0.0.1:1", "[fd00::1]:65535"] {
            assert!(addressed(address).is_ok(), "{address}");
        }
        for address in [
            "",
            "gw1",
            "gw1:",
            ":7883",
            "gw1:0",
            "gw1:65536",
            "gw1:+5",
            "gw1:mqtt",
            "gw 1:7883",
            "http://gw1:7883",
            "0.0.0.0:7883",
            "[::]:7883",
            "fd00::1",
            "fd00::1:7883",
            "[gw1]:7883",
        ] {
            let error = addressed(address).unwrap_err().to_string();
            assert!(error.contains("cluster_address"), "{address}: {error}");
        }
        let secret = "https://u:SECRET@gw1:7883";
        let errors = [
            addressed(secret).unwrap_err().to_string(),
            secret.parse::<ClusterListen>().unwrap_err(),
        ];
        for error in errors {
            assert!(error.contains("`https://***@gw1:7883`"), "{error}");
        }
    }

    #[test]
    fn addresses_of_etcd_have_a_port() {
        let refers = |url: &str| {
            let mut flags = flags();
            flags.cluster = vec![url.into()];
            flags.load()
        };
        for url in ["http://etcd1:2379", "http://[::1]:2379", "http://e:80/"] {
            assert!(refers(url).is_ok(), "{url}");
        }
        // Without a port they would be those of a web server.
        for url in ["etcd1:2379", "http://", "http://etcd1", "http://[::1]"] {
            let error = refers(url).unwrap_err().to_string();
            assert!(error.contains("with its port"), "{url}: {error}");
        }
        // Regression: the log got the password.
        let error = refers("https://u:SECRET@etcd1:2379").unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with("`https://***@etcd1:2379` is"), "{error}");
    }

    #[test]
    fn settings_of_a_cluster_need_one() {
        assert!(ClusterFlags::default().load().unwrap().is_none());
        let mut flags = flags();
        flags.cluster.clear();
        assert!(refused(flags).starts_with("name requires a cluster"));
    }

    #[test]
    fn certificates_and_encrypted_addresses_belong_together() {
        let ca = || Some(PathBuf::from("ca.pem"));
        let mut plain = flags();
        plain.cluster_ca = ca();
        let mut mixed = plain.clone();
        mixed.cluster.insert(0, "https://etcd1:2379".into());
        for flags in [plain, mixed] {
            let error = refused(flags);
            let says = "`http://127.0.0.1:2379` is unencrypted";
            assert!(error.contains(says), "{error}");
        }
        let mut unverified = flags();
        unverified.cluster = vec!["https://etcd1:2379".into()];
        let error = refused(unverified.clone());
        assert!(error.contains("add --cluster-ca FILE"), "{error}");
        assert!(!error.contains("unencrypted"), "{error}");
        unverified.cluster_ca = ca();
        assert!(unverified.clone().load().is_ok());
        unverified.cluster_cert = Some("c.pem".into());
        let error = refused(unverified);
        assert!(
            error.contains("--cluster-cert and --cluster-key"),
            "{error}"
        );
    }

    #[test]
    fn user_and_password_belong_together() {
        let login = |user: Option<&str>, file: Option<&str>| {
            let mut flags = flags();
            flags.cluster_user = user.map(Into::into);
            flags.cluster_password_file = file.map(Into::into);
            flags.load()
        };
        let config = login(Some("statehouse"), Some("password")).unwrap();
        let config = config.expect("a cluster");
        let (user, EtcdPassword::File(file)) = config.etcd.login.unwrap() else {
            panic!("the password is in a file");
        };
        assert_eq!((&*user, file), ("statehouse", PathBuf::from("password")));
        for (user, file) in [
            (Some("statehouse"), None),
            (None, Some("password")),
            (Some(""), Some("password")),
        ] {
            let error = login(user, file).unwrap_err().to_string();
            assert!(error.contains("cluster_user"), "{error}");
        }
    }

    #[test]
    fn names_of_hosts_are_checked() {
        let mut flags = flags();
        flags.name = Some("gw 1".into());
        assert!(refused(flags).contains("name of the host"));
    }
}
