//! What a host does before it takes part in its cluster: locks its data directory, and connects to
//! the log.

use std::collections::HashSet;
use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::mem::{self, Discriminant};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use data_encoding::HEXLOWER;
use statehouse_cluster::etcd::{CheckError, Etcd, Login, ReadTls, Tls};
use statehouse_cluster::{
    Access, Clock, ClusterError, EngineError, Id, LogPoint, MachineClock, Malformed, Modules,
    Options, Secret, Stop, confirm_copy, identity, members, overview, store_name,
};
use statehouse_protocol::{ProgramVersion, WrittenBy};
use statehouse_wal::{Directory, Probed, has_log, probe, probe_lock};

use super::Failure;
use super::member::{EXIT_CLUSTER_SETTINGS, failure};
use super::serve::print;
use super::service_manager;
use crate::STANDARD_POLICY;
use crate::cluster::history;
use statehouse_config::{ClusterConfig, Config, EtcdConfig, limits};
use statehouse_core::clock::wall_ms;
use statehouse_files::atomic;
use statehouse_link::tls::pem_file;
use statehouse_offline::{ClusterMark, PastError, is_unfinished};

/// The file with the id of the last process that used a data directory.
const PROCESS_FILE: &str = "cluster-process";

/// A random number of the running kernel (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What a host needs to take part.
pub(super) struct Joined {
    pub(super) engine: Arc<Etcd>,
    pub(super) clock: Arc<dyn Clock>,
    /// The cluster as operators see it.
    pub(super) access: Access,
    pub(super) options: Options,
    /// The id of the cluster.
    pub(super) cluster: Id,
    /// The name of the store of the cluster.
    pub(super) store: String,
    pub(super) secret: [u8; 32],
    pub(super) modules: Modules,
    /// The lock of the data directory: it proves that the process before has ended.
    _lock: Directory,
}

/// Locks the data directory, and connects to the log of the cluster.
pub(super) async fn join(
    config: &Config,
    cluster: &ClusterConfig,
    port: &TcpListener,
) -> Result<Joined, Failure> {
    let directory = &config.storage.directory;
    let lock = lock(directory).map_err(Failure::usage)?;
    let (process, predecessor) = next_process(directory)
        .with_context(|| format!("the data directory {} cannot be used", directory.display()))
        .map_err(Failure::usage)?;
    let address = port.local_addr()?.to_string();
    let mut options = cluster.options(&address, process);
    options.predecessor = predecessor;
    let etcd = Arc::new(connect(&cluster.etcd).map_err(Failure::usage)?);
    let clock: Arc<dyn Clock> = Arc::new(MachineClock);
    let mut waits = Waits::default();
    // Must be first: the first answer decides which etcd cluster this host uses, and it could be
    // that of a foreign server.
    check_etcd(&etcd, cluster, &mut waits).await?;
    let access = Access::new(etcd.clone(), clock.clone(), &cluster.etcd.name);
    let (id, secret) = read_identity(&access, cluster, &mut waits).await?;
    let copied = mark(directory, id, &cluster.etcd.name).map_err(Failure::usage)?;
    if let Some(point) = copied {
        let confirmed = confirm_copy(etcd.clone(), clock.clone(), options.clone(), id, point);
        match confirmed.await {
            Err(stop @ Stop::Head(Malformed::LaterFormat { .. })) => {
                return Err(too_old(&stop, &access).await);
            }
            confirmed => confirmed.map_err(|stop| failure(&stop))?,
        }
    }
    let modules = Modules::new(access.clone(), cluster.quota_bytes);
    store_standard_policy(&modules, &access, cluster, &mut waits)
        .await
        .context("the built-in policy cannot be written to the log of the cluster")
        .map_err(Failure::transport)?;
    let store = store_name(&cluster.etcd.name, id);
    tracing::info!("the name of this store is {store}");
    Ok(Joined {
        engine: etcd,
        clock,
        access,
        options,
        cluster: id,
        store,
        secret: secret.0,
        modules,
        _lock: lock,
    })
}

/// Another version of this program may need the built-in policy of the first leader to lead. Later
/// leaders keep that one, so then the log can do without the one of this program. Waits while no
/// server of etcd serves this host.
async fn store_standard_policy(
    modules: &Modules,
    access: &Access,
    cluster: &ClusterConfig,
    waits: &mut Waits,
) -> Result<(), ClusterError> {
    let error = loop {
        match modules.put(STANDARD_POLICY).await {
            Ok(_) => return Ok(()),
            Err(error) if has_no_room(&error) => break error,
            Err(ClusterError::Engine { error, .. }) if may_pass(&error) => {
                wait_for_etcd(cluster, &CheckError::from(error), waits).await;
            }
            Err(error) => return Err(error),
        }
    };
    let found = overview(access, wall_ms()).await?;
    if found.head.epoch == 0 {
        return Err(error);
    }
    tracing::warn!("the built-in policy of this program is not in the log of the cluster: {error}");
    Ok(())
}

/// Whether etcd has no room. A host of a cluster with room for nothing still takes part: it makes
/// room.
fn has_no_room(error: &ClusterError) -> bool {
    matches!(
        error,
        ClusterError::Limit { .. }
            | ClusterError::Engine {
                error: EngineError::NoSpace,
                ..
            }
    )
}

/// Locks a directory that holds no log of its own.
fn lock(directory: &Path) -> anyhow::Result<Directory> {
    let shown = directory.display();
    let unusable = || format!("the data directory {shown} cannot be used");
    let lock = Directory::open(directory).with_context(unusable)?;
    refuse_own_log(&lock)?;
    Ok(lock)
}

fn refuse_own_log(directory: &Directory) -> anyhow::Result<()> {
    let shown = directory.path().display();
    let unusable = || format!("the data directory {shown} cannot be used");
    if is_unfinished(directory.path()) {
        return Err(PastError::Unfinished(directory.path().to_owned()).into());
    }
    anyhow::ensure!(
        !has_log(directory).with_context(unusable)?,
        "the data directory {shown} holds the store of a single host: name another directory with --data, or create the cluster from it with `statehouse cluster init --from {shown}`"
    );
    Ok(())
}

/// Checks the data directory of a host without a lock and without a change. Returns whether another
/// process uses it.
pub(super) fn look(directory: &Path) -> anyhow::Result<bool> {
    let unusable = || format!("the data directory {} cannot be used", directory.display());
    let Probed::Present { locked } = probe(directory).with_context(unusable)? else {
        return Ok(false);
    };
    probe_lock(directory).with_context(unusable)?;
    let disk = Directory::read_only(directory).with_context(unusable)?;
    refuse_own_log(&disk)?;
    ClusterMark::of(directory)?;
    Ok(locked)
}

/// A new id for this process, and the id of the process before in this directory.
///
/// The lock proves the end of the process before only in the same directory and in the same kernel.
/// The process of the original of a copy may be running, and so may that of a machine whose volume
/// was moved to this one. So the file names directory and kernel too.
fn next_process(directory: &Path) -> anyhow::Result<(Id, Option<Id>)> {
    let path = directory.join(PROCESS_FILE);
    let inode = fs::metadata(directory).context(PROCESS_FILE)?;
    // Without it, no process before is known.
    let boot = fs::read_to_string(BOOT_ID).unwrap_or_default();
    let boot = boot.trim_end();
    let place = format!("{}:{} {boot}", inode.dev(), inode.ino());
    let before = match fs::read(&path) {
        Ok(text) => {
            let text = String::from_utf8_lossy(&text);
            let (id, of) = text.trim_end().split_once(' ').unwrap_or_default();
            // Without the id, a takeover from that process waits for its lease.
            let id = HEXLOWER.decode(id.as_bytes()).ok();
            let id = id.filter(|_| of == place && !boot.is_empty());
            id.and_then(|id| id.try_into().ok()).map(Id)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).context(PROCESS_FILE),
    };
    let id = Id::random().context("the system has no random numbers")?;
    let text = format!("{} {place}\n", HEXLOWER.encode(&id.0));
    atomic::replace(&path, text.as_bytes(), 0o600).context(PROCESS_FILE)?;
    Ok((id, before))
}

/// Prepares the connections to etcd. Must be called within a runtime.
pub(crate) fn connect(config: &EtcdConfig) -> anyhow::Result<Etcd> {
    let tls = config.ca.as_ref();
    let tls = tls.map(|ca| read_tls(ca, config.certificate.as_ref()));
    let tls = tls.transpose()?;
    let mut etcd = Etcd::new(&config.urls, tls.as_ref()).map_err(anyhow::Error::msg)?;
    if let (Some(tls), Some(ca)) = (tls, config.ca.clone()) {
        let certificate = config.certificate.clone();
        let read = move || read_tls(&ca, certificate.as_ref());
        let read: ReadTls = Arc::new(move || read().map_err(|error| format!("{error:#}")));
        etcd = etcd.with_renewed_tls(&tls, &read);
    }
    let Some((user, password)) = config.login.clone() else {
        return Ok(etcd);
    };
    let password = move || password.read().map_err(|error| error.to_string());
    // A missing file is found at the start.
    password().map_err(anyhow::Error::msg)?;
    Ok(etcd.with_login(Login {
        user,
        password: Arc::new(password),
    }))
}

/// Reads the certificates and the key for etcd.
fn read_tls(ca: &Path, certificate: Option<&(PathBuf, PathBuf)>) -> anyhow::Result<Tls> {
    Ok(Tls {
        ca_pem: pem_file(ca)?,
        identity_pem: match certificate {
            Some((certificate, key)) => Some((pem_file(certificate)?, pem_file(key)?)),
            None => None,
        },
    })
}

/// Marks the data directory as that of a host of this cluster. Returns the place up to which it has
/// a copy of the log.
fn mark(directory: &Path, id: Id, name: &str) -> anyhow::Result<Option<LogPoint>> {
    let cluster = HEXLOWER.encode(&id.0);
    let shown = directory.display();
    let Some(mark) = ClusterMark::of(directory)? else {
        let mark = ClusterMark {
            cluster,
            name: name.to_owned(),
            copy: None,
        };
        history::write_mark(directory, &mark)
            .with_context(|| format!("the data directory {shown} cannot be used"))?;
        return Ok(None);
    };
    anyhow::ensure!(
        mark.cluster == cluster,
        "the data directory {shown} belongs to another cluster, with the name {} and the id {}, but {name} at this etcd has the id {cluster}: name another directory with --data",
        mark.name,
        mark.cluster
    );
    Ok(history::copied(&mark))
}

/// The failure of a host that cannot read the format of the log. Names the version to install, if a
/// host of the cluster has recorded it.
pub(super) async fn too_old(error: &impl Display, access: &Access) -> Failure {
    let listed = tokio::time::timeout(limits::CLUSTER_START_RETRY, members(access)).await;
    let hosts = listed.into_iter().flatten().flatten();
    let versions = hosts.filter_map(|it| ProgramVersion::parse(&it.info.ok()?.description.version));
    let latest = versions.max().filter(|it| it.is_later());
    let advice = latest.map_or_else(String::new, |it| format!(". {}", WrittenBy(Some(it))));
    Failure::Cluster {
        code: EXIT_CLUSTER_SETTINGS,
        message: format!("{error}{advice}"),
    }
}

/// The kinds of reasons for which a host has waited for etcd: no server answers, or the servers
/// that answer refuse this host.
#[derive(Default)]
struct Waits {
    last: Option<Discriminant<CheckError>>,
    printed: HashSet<Discriminant<CheckError>>,
}

/// Checks the servers of etcd. Waits while none serves this host.
async fn check_etcd(
    etcd: &Etcd,
    cluster: &ClusterConfig,
    waits: &mut Waits,
) -> Result<(), Failure> {
    loop {
        match etcd.check().await {
            Ok(_) => return Ok(()),
            Err(error @ CheckError::Unusable(_)) => return Err(Failure::usage(error)),
            Err(error @ (CheckError::NoAnswer(_) | CheckError::Refused(_))) => {
                wait_for_etcd(cluster, &error, waits).await;
            }
        }
    }
}

/// Waits before the next attempt. Notifies the service manager of each change of the reason: etcd
/// may be down for longer than a manager lets a start take. Prints a reason of each kind once,
/// because servers that fail differently may give the reason in turn.
async fn wait_for_etcd(cluster: &ClusterConfig, error: &CheckError, waits: &mut Waits) {
    let reason = mem::discriminant(error);
    if waits.last.replace(reason) != Some(reason) {
        let urls = cluster.etcd.urls.join(", ");
        let line = format!("waiting for etcd at {urls}: {error}");
        service_manager::ready(&line);
        if waits.printed.insert(reason) {
            print(&[line]);
        }
    }
    tokio::time::sleep(limits::CLUSTER_START_RETRY).await;
}

/// Whether a failed call may succeed later: no server of etcd answered, or the only ones that did
/// refuse this client for the time being.
fn may_pass(error: &EngineError) -> bool {
    !matches!(CheckError::from(error.clone()), CheckError::Unusable(_))
}

/// Reads the id and the secret of the cluster. Waits while no server of etcd serves this host,
/// because all machines may start at the same time. An end would be final: systemd does not repeat
/// a start that failed by its settings.
async fn read_identity(
    access: &Access,
    cluster: &ClusterConfig,
    waits: &mut Waits,
) -> Result<(Id, Secret), Failure> {
    loop {
        let error = match identity(access).await {
            Ok(identity) => return Ok(identity),
            Err(ClusterError::Engine { error, .. }) if may_pass(&error) => CheckError::from(error),
            Err(
                error @ ClusterError::Malformed {
                    error: Malformed::LaterFormat { .. },
                    ..
                },
            ) => {
                return Err(too_old(&error, access).await);
            }
            Err(error) => return Err(Failure::usage(error)),
        };
        wait_for_etcd(cluster, &error, waits).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_waits_while_a_server_of_etcd_refuses_this_host_only() {
        for (refusal, waits) in [
            ("etcdserver: rpc not supported for learner", true),
            (
                "etcd does not let the user gw log in (authentication failed)",
                true,
            ),
            ("unknown service etcdserverpb.KV", false),
        ] {
            let refusal = EngineError::Refused(refusal.to_owned());
            assert_eq!(may_pass(&refusal), waits, "{refusal}");
        }
        assert!(may_pass(&EngineError::NotApplied("no route".to_owned())));
    }

    #[test]
    fn only_the_directory_itself_proves_the_end_of_its_process() {
        let place = tempfile::tempdir().unwrap();
        let [original, copy] = ["original", "copy"].map(|name| place.path().join(name));
        for directory in [&original, &copy] {
            fs::create_dir(directory).unwrap();
        }
        let (first, before) = next_process(&original).unwrap();
        assert_eq!(before, None);
        fs::copy(original.join(PROCESS_FILE), copy.join(PROCESS_FILE)).unwrap();
        assert_eq!(next_process(&copy).unwrap().1, None);
        let (second, before) = next_process(&original).unwrap();
        assert_eq!(before, Some(first));
        // The file of an earlier version names no directory.
        fs::write(original.join(PROCESS_FILE), HEXLOWER.encode(&second.0)).unwrap();
        assert_eq!(next_process(&original).unwrap().1, None);
        // After a reboot the process has ended, but the volume may be that of another machine.
        let text = fs::read_to_string(original.join(PROCESS_FILE)).unwrap();
        let (rest, _) = text.rsplit_once(' ').unwrap();
        fs::write(
            original.join(PROCESS_FILE),
            format!("{rest} of-another-boot\n"),
        )
        .unwrap();
        assert_eq!(next_process(&original).unwrap().1, None);
    }
}
