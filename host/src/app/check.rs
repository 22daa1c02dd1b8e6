//! `serve --check`: finds everything that would make a start fail, without a start.
//!
//! Calls the functions that a start calls, so that both refuse the same with the same words. It
//! must never change a file with a name, take a lock or listen. Warnings of these functions go to
//! stderr.

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use socket2::{Domain, Protocol, Socket, Type};
use statehouse_wal::{Probed, probe};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::administration::{Administration, CannotListen};
use super::start::engine_with_standard;
use super::{Failure, log_filter};
use crate::STANDARD_POLICY;
use crate::admin::has_stale_socket;
use crate::data_directory;
use crate::policies::delivery::Trust;
use crate::policies::startup::{Keeps, Opening};
use statehouse_access::AccessControl;
use statehouse_config::{AdminPlace, Config, Durability, Flags, TransportChoice};
use statehouse_core::limits::FUEL_PER_SCAN_MAX;
use statehouse_core::log::Image;
use statehouse_files::watch::Reloads;
use statehouse_listener::dates::{self, CertificateFiles};
use statehouse_listener::{Certificates, ListenerError};
use statehouse_precompiled::Modules;
use statehouse_server::traces::Traces;
use statehouse_transport::foreign;

/// The result of a check.
#[derive(Default)]
pub struct Findings {
    /// What would make a start fail, in the order in which a start finds it. Only a data directory
    /// that cannot be created or locked is found by a start before the addresses for operators.
    pub problems: Vec<Failure>,
    /// What is as expected while the store runs.
    pub notes: Vec<String>,
}

impl Findings {
    fn usage(&mut self, errors: impl IntoIterator<Item = impl Into<anyhow::Error>>) {
        self.problems.extend(errors.into_iter().map(Failure::usage));
    }

    fn transport(&mut self, errors: impl IntoIterator<Item = impl Into<anyhow::Error>>) {
        self.problems
            .extend(errors.into_iter().map(Failure::transport));
    }
}

/// Checks the settings and everything that they name. Warnings go to stderr.
pub fn check(flags: Flags) -> Findings {
    // As a start does. A failure changes only limits.
    let _ = super::raise_open_files();
    let lines = fmt::layer().with_writer(io::stderr).without_time();
    let lines = lines.with_target(false).with_ansi(false);
    // Fails only if a library user has set another subscriber, which then gets the warnings.
    let _ = tracing_subscriber::registry()
        .with(LevelFilter::WARN)
        .with(lines)
        .try_init();
    let mut found = Findings::default();
    let (config, wrong) = statehouse_config::check(flags);
    found.usage(wrong);
    found.usage(log_filter(&config.log_filter).err());
    check_transport(&config, &mut found);
    let mut addresses = Addresses::default();
    addresses.check_clients(&config, &mut found);
    warn_of_certificates(&config);
    warn_of_low_fuel(&config);
    let keys = config.trusted_keys.iter();
    let wrong = keys.filter_map(|key| Trust::new(std::slice::from_ref(key), false).err());
    let wrong: Vec<_> = wrong.collect();
    // Otherwise there may be too many keys.
    let are_valid = wrong.is_empty();
    let trust = are_valid.then(|| Trust::new(&config.trusted_keys, config.allow_unsigned));
    found.usage(wrong);
    let trust = trust.and_then(|it| it.map_err(|error| found.usage([error])).ok());
    found.usage(AccessControl::check(&config.access));
    found.usage(Administration::check(&config));
    addresses.check_administration(&config, &mut found);
    check_data(&config, trust, &mut found);
    let traces = config.traces.as_ref();
    found.usage(traces.and_then(|it| Traces::check(it).err()));
    found
}

/// Logs a warning for each certificate that is not valid now or expires soon. The listeners of
/// clients do so for theirs.
pub(super) fn warn_of_certificates(config: &Config) {
    certificates(config).warn();
}

/// Logs a warning if a SCAN can use up its fuel. The failures count against its policy.
pub(super) fn warn_of_low_fuel(config: &Config) {
    let max_fuel = config.bounds.quota.fuel_max;
    if max_fuel < FUEL_PER_SCAN_MAX {
        tracing::warn!(
            "max_fuel is {max_fuel}: below {FUEL_PER_SCAN_MAX} a SCAN of many keys may fail, which counts as a failure of the policy"
        );
    }
}

/// Logs the warnings of [`warn_of_certificates`], and those of the listeners, again once a day.
pub(super) fn warn_daily(config: &Config, reloads: &mut Reloads) {
    let mut files = certificates(config);
    if let TransportChoice::Embedded(listen) = &config.transport
        && let Some(tls) = &listen.tls
    {
        files.add(tls);
    }
    reloads.warn_daily(move |now| files.problems(now));
}

/// All certificates but those of the listeners of clients.
fn certificates(config: &Config) -> CertificateFiles {
    let mut files = CertificateFiles::default();
    if let TransportChoice::Foreign(foreign) = &config.transport {
        let own = foreign.certificate.as_ref();
        files.chains.extend(own.map(|it| it.0.clone()));
        files.authorities.extend(foreign.ca.clone());
        // With listeners of clients, these are the same files.
        if let Some(admin) = &config.admin_tls {
            files.add(&admin.files);
        }
    }
    #[cfg(feature = "cluster")]
    if let Some(cluster) = &config.cluster {
        let own = cluster.etcd.certificate.as_ref();
        files.chains.extend(own.map(|it| it.0.clone()));
        files.authorities.extend(cluster.etcd.ca.clone());
    }
    let collector = config.traces.as_ref().and_then(|it| it.ca.clone());
    files.authorities.extend(collector);
    files
}

/// The certificates of listeners, or the files of the connection to a foreign broker.
fn check_transport(config: &Config, found: &mut Findings) {
    match &config.transport {
        TransportChoice::Embedded(listen) => {
            if let Some(files) = &listen.tls {
                found.transport(Certificates::check(files));
                dates::warn_of_files(files);
            }
        }
        TransportChoice::Foreign(config_of_broker) => {
            let packet_bytes_max = config.bounds.broker.packet_bytes_max;
            found.transport(foreign::options(config_of_broker, packet_bytes_max).err());
        }
    }
}

/// The addresses that a start binds, each with the name of its setting.
#[derive(Default)]
struct Addresses(Vec<(String, SocketAddr)>);

impl Addresses {
    /// Checks one address. If it is in use, that is only a note, since the store may be running.
    fn check(
        &mut self,
        setting: &str,
        address: SocketAddr,
        found: &mut Findings,
        unusable: impl FnOnce(io::Error) -> Failure,
    ) {
        found.usage(self.add(setting, address).err());
        match reserve(address) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AddrInUse => found.notes.push(format!(
                "{setting} {address} is in use, which is as expected while the store runs; a start needs it free"
            )),
            Err(error) => found.problems.push(unusable(error)),
        }
    }

    /// Adds an address. Fails if it overlaps another one.
    fn add(&mut self, setting: &str, address: SocketAddr) -> Result<(), CannotListen> {
        let name = format!("{setting} {address}");
        let other = self.0.iter().find(|(_, it)| overlap(*it, address));
        let added = other.map_or(Ok(()), |(other, _)| {
            Err(CannotListen::Overlap(name.clone(), other.clone()))
        });
        self.0.push((name, address));
        added
    }

    /// The addresses for clients, and for the other hosts of a cluster.
    fn check_clients(&mut self, config: &Config, found: &mut Findings) {
        for (setting, address) in of_clients(config) {
            self.check(setting, address, found, |error| {
                let error = anyhow::Error::from(ListenerError::Address(address, error));
                Failure::transport(error.context(setting))
            });
        }
    }

    /// The addresses of the admin API and of the metrics, which a start binds after those of
    /// clients, and the certificates that no listener of clients has.
    fn check_administration(&mut self, config: &Config, found: &mut Findings) {
        if let (TransportChoice::Foreign(_), Some(tls)) = (&config.transport, &config.admin_tls) {
            found.transport(Certificates::check(&tls.files));
        }
        for (setting, address, unusable) in of_administration(config) {
            self.check(setting, address, found, |error| {
                Failure::usage(anyhow::Error::from(error).context(unusable))
            });
        }
        if let Some(AdminPlace::Unix(path)) = &config.admin {
            check_socket(path, found);
        }
    }

    /// Names two addresses of a start that overlap, if there are any.
    fn overlap(config: &Config) -> Option<CannotListen> {
        let others = of_administration(config).into_iter();
        let others = others.map(|(setting, address, _)| (setting, address));
        let mut addresses = Self::default();
        let mut all = of_clients(config).into_iter().chain(others);
        all.find_map(|(setting, address)| addresses.add(setting, address).err())
    }
}

/// The addresses for clients, and for the other hosts of a cluster.
fn of_clients(config: &Config) -> Vec<(&'static str, SocketAddr)> {
    let mut all = Vec::new();
    if let TransportChoice::Embedded(listen) = &config.transport {
        all.extend(listen.listeners.iter().map(|it| ("listen", it.address)));
    }
    #[cfg(feature = "cluster")]
    if let Some(cluster) = &config.cluster {
        all.push(("cluster_listen", cluster.listen));
    }
    all
}

/// The addresses of the admin API and of the metrics, each with the context of its errors.
fn of_administration(config: &Config) -> Vec<(&'static str, SocketAddr, CannotListen)> {
    let mut all = Vec::new();
    if let Some(place @ AdminPlace::Tcp(address)) = &config.admin {
        all.push(("admin", *address, CannotListen::Admin(place.to_string())));
    }
    if let Some(tls) = &config.admin_tls {
        let place = format!("https://{}", tls.address);
        all.push(("admin", tls.address, CannotListen::Admin(place)));
    }
    if let Some(place @ AdminPlace::Tcp(address)) = &config.metrics {
        let unusable = CannotListen::Metrics(place.to_string());
        all.push(("metrics", *address, unusable));
    }
    all
}

/// The error of a start that cannot bind an address. Names two addresses that overlap: the system
/// reports one of them as in use.
pub(super) fn cannot_bind(config: &Config, error: anyhow::Error) -> anyhow::Error {
    let of_listener = match error.downcast_ref() {
        Some(ListenerError::Address(_, error)) => Some(error),
        _ => None,
    };
    let of_system = || error.chain().find_map(|it| it.downcast_ref::<io::Error>());
    let cause = of_listener.or_else(of_system);
    let is_in_use = cause.is_some_and(|it| it.kind() == ErrorKind::AddrInUse);
    let overlap = is_in_use.then(|| Addresses::overlap(config)).flatten();
    overlap.map_or(error, anyhow::Error::from)
}

fn check_socket(path: &Path, found: &mut Findings) {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let unusable = |error: &dyn Display| {
        Failure::Transport(format!(
            "the admin API cannot listen on unix:{}: {error}",
            path.display()
        ))
    };
    // Such a directory is temporary: the unit creates it at a start (RuntimeDirectory of systemd).
    if parent.parent() == Some(Path::new("/run")) && !parent.exists() {
        return found.notes.push(format!(
            "there is no directory {}, which is as expected while the unit is stopped; a start without the unit needs it",
            parent.display()
        ));
    }
    match probe(parent) {
        Ok(Probed::Present { .. }) => {}
        Ok(Probed::Missing) => {
            let missing = format!("there is no directory {}: create it", parent.display());
            found.problems.push(unusable(&missing));
        }
        Err(error) => found.problems.push(unusable(&error)),
    }
    match has_stale_socket(path) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            found
                .notes
                .push(format!("unix:{}: {error}", path.display()));
        }
        Err(error) => found.problems.push(unusable(&error)),
    }
}

/// Binds an address for a moment. Without `listen` no client can connect, and a store that starts
/// at the same time can bind it too.
fn reserve(address: SocketAddr) -> io::Result<()> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())
}

/// Whether two sockets cannot listen on these addresses at the same time.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let covers = |wide: IpAddr, narrow: IpAddr| {
        wide.is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4())
    };
    one.port() != 0
        && one.port() == other.port()
        && (one.ip() == other.ip() || covers(one.ip(), other.ip()) || covers(other.ip(), one.ip()))
}

/// The data directory, and the policies that it and the settings name.
fn check_data(config: &Config, trust: Option<Trust>, found: &mut Findings) {
    let directory = config.storage.directory.display();
    let mut image = Image::new(config.storage.duplicates);
    let in_use: Option<anyhow::Result<bool>> = match (&config.cluster, config.storage.durability) {
        #[cfg(feature = "cluster")]
        (Some(cluster), _) => {
            let looked = super::join::look(&config.storage.directory);
            found.usage(check_etcd(cluster).err());
            Some(looked)
        }
        (_, Durability::Memory) => None,
        _ => Some(match data_directory::look(&config.storage) {
            Ok(looked) => {
                image = looked.image;
                Ok(looked.in_use)
            }
            Err(error) => Err(error.into()),
        }),
    };
    let keeps = match in_use {
        Some(Ok(_)) => Keeps::Checks,
        // A directory that cannot be used is reported once.
        None | Some(Err(_)) => Keeps::Nothing,
    };
    match in_use {
        Some(Ok(true)) => found.notes.push(format!(
            "the data directory {directory} is in use by another process, which is as expected while the store runs; a start needs it free"
        )),
        None | Some(Ok(false)) => {}
        Some(Err(error)) => found.usage([error]),
    }
    if let Some(trust) = trust.filter(|_| config.cluster.is_none()) {
        found.usage(check_policies(config, &trust, &image, keeps).err());
    }
}

/// The certificates for etcd. Does not connect.
#[cfg(feature = "cluster")]
fn check_etcd(cluster: &statehouse_config::ClusterConfig) -> anyhow::Result<()> {
    use anyhow::Context;

    let runtime = super::runtime(1).context("a thread for etcd cannot be started")?;
    let _within = runtime.enter();
    super::connect(&cluster.etcd).map(drop)
}

/// Loads the policies of a start: the one of the settings, and those that the data directory names.
/// Neither they nor the compiler's results are saved.
fn check_policies(
    config: &Config,
    trust: &Trust,
    image: &Image,
    keeps: Keeps,
) -> anyhow::Result<()> {
    let (engine, standard) = engine_with_standard(None)?;
    let opening = Opening {
        engine: &engine,
        standard: &Arc::new(standard),
        standard_file: STANDARD_POLICY,
        modules: &Modules::of(&config.storage.directory),
        trust,
        keeps,
    };
    opening.registry(&config.policy, image).map(drop)
}

#[cfg(test)]
mod tests {
    #[test]
    fn addresses_overlap_if_one_covers_the_other() {
        let overlap = |one: &str, other: &str| {
            let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(super::overlap(one, other), super::overlap(other, one));
            super::overlap(one, other)
        };
        assert!(overlap("127.0.0.1:1", "127.0.0.1:1"));
        assert!(overlap("127.0.0.1:1", "0.0.0.0:1"));
        assert!(overlap("127.0.0.1:1", "[::]:1") && overlap("[::1]:1", "[::]:1"));
        assert!(!overlap("[::1]:1", "0.0.0.0:1"));
        assert!(!overlap("127.0.0.1:1", "127.0.0.1:2"));
        assert!(!overlap("127.0.0.1:0", "127.0.0.1:0"));
    }
}
