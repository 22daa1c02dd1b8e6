//! `statehouse cluster`: creates, shows and changes the cluster that several hosts form.

use std::fmt::Display;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use serde_json::{Value as Json, json};
use statehouse_cluster::etcd::Etcd;
use statehouse_cluster::{
    Access, ClusterError, Engine as _, EngineError, Finding, FirstState, Id, MachineClock, Modules,
    Overview, Severity, Sizes, check, check_room, create, create_from, identity, overview,
    remove_member,
};
use statehouse_offline::{Past, PastError};
use statehouse_wal::{Directory, has_log};
use tokio::time::timeout;

use super::data::{self, count};
use super::output::{self, Exit, Failure, emit, emit_either, notice};
use super::store::Store;
use crate::app::connect;
use statehouse_config::{ClusterFlags, EtcdConfig, percent};
use statehouse_core::clock::wall_ms;
use statehouse_listener::front::probe;

/// Create, check and show a cluster of hosts
///
/// Several hosts form one store: each accepts clients, one of them decides, and an etcd cluster
/// keeps the log. If a machine dies, another host continues within seconds.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse cluster check --cluster http://etcd1:2379,http://etcd2:2379,http://etcd3:2379
  statehouse cluster init --cluster http://etcd1:2379 --cluster-name plant7
  statehouse serve --cluster http://etcd1:2379 --cluster-name plant7 --name gw1 \\
    --cluster-listen 10.0.0.1:7883
  statehouse cluster status --cluster http://etcd1:2379 --cluster-name plant7
  statehouse cluster handover gw2               # on the machine of the host that leads")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Init(InitArgs),
    Status(StatusArgs),
    Check(CheckArgs),
    Handover(HandoverArgs),
    Upgrade(UpgradeArgs),
    Remove(RemoveArgs),
}

/// The etcd servers and the name of the cluster.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
struct Log {
    /// The addresses of the etcd servers, such as https://etcd1:2379; may be given more than once
    #[arg(
        long,
        value_name = "URL",
        env = "STATEHOUSE_CLUSTER",
        value_delimiter = ',',
        required = true
    )]
    cluster: Vec<String>,

    /// The name of the cluster [default: statehouse]
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_CLUSTER_NAME")]
    cluster_name: Option<String>,

    /// CA certificates (PEM) that the certificates of the etcd servers are verified against
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_CA")]
    cluster_ca: Option<PathBuf>,

    /// The certificate (PEM) of this machine at etcd, with --cluster-key
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_CERT")]
    cluster_cert: Option<PathBuf>,

    /// The private key of --cluster-cert (PEM)
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_KEY")]
    cluster_key: Option<PathBuf>,

    /// The user at etcd
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_CLUSTER_USER")]
    cluster_user: Option<String>,

    /// A file with the password of --cluster-user [default: STATEHOUSE_CLUSTER_PASSWORD]
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_CLUSTER_PASSWORD_FILE")]
    cluster_password_file: Option<PathBuf>,
}

/// Create the log of a cluster
///
/// The hosts can then be started with `statehouse serve --cluster`. Nothing is changed if the
/// cluster exists already.
#[derive(Debug, clap::Args)]
struct InitArgs {
    /// Begin with the store in this data directory, or with the copy that a host of a lost cluster
    /// has in it. No process may use the directory, which stays as it is
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,

    /// Exit with 0 if the cluster exists already
    #[arg(long)]
    if_missing: bool,

    #[command(flatten)]
    log: Log,

    #[command(flatten)]
    quota: Quota,
}

/// The quota of the etcd servers.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
struct Quota {
    /// The --quota-backend-bytes of the etcd servers [default: 2147483648]
    #[arg(long, value_name = "BYTES", env = "STATEHOUSE_CLUSTER_QUOTA", value_parser = statehouse_config::nonzero_size)]
    cluster_quota: Option<NonZeroU64>,
}

impl Quota {
    fn bytes(&self) -> u64 {
        self.cluster_quota
            .map_or(Sizes::default().quota_bytes, NonZeroU64::get)
    }
}

/// Show the leader, the hosts and the log of a cluster
///
/// By the log and the records of the hosts in etcd: no host is asked, and one that died may be
/// shown as before. `statehouse cluster check` asks the leader for a sign of life.
#[derive(Debug, clap::Args)]
struct StatusArgs {
    #[command(flatten)]
    log: Log,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measure the etcd servers of a cluster, and say what to change
///
/// Asks the leader for a sign of life, and connects to the address at which other hosts reach it.
/// Exits with 1 if the cluster does not work or can lose data.
/// Works before `cluster init` too.
#[derive(Debug, clap::Args)]
struct CheckArgs {
    #[command(flatten)]
    log: Log,

    #[command(flatten)]
    quota: Quota,
}

/// Let another host lead, for example before this machine restarts
///
/// Addresses the host that leads, through its admin API. Its clients reconnect to the next leader
/// within a second, through any host. A host that stops by SIGTERM hands over too.
///
/// A host that is named leads next, if it follows and has every policy. If it does not take over
/// within 3 s, any host may. Refused if no host could lead next.
#[derive(Debug, clap::Args)]
struct HandoverArgs {
    /// The host that leads next [default: the fastest one]
    host: Option<String>,

    #[command(flatten)]
    store: Store,
}

/// Let the hosts write the newest format of the log, after all of them were updated
///
/// Addresses the host that leads, through its admin API. Changes nothing if a listed host cannot
/// read that format. Older versions cannot join the cluster afterwards.
#[derive(Debug, clap::Args)]
struct UpgradeArgs {
    #[command(flatten)]
    store: Store,
}

/// Remove a host that will not return from the list of hosts
///
/// The host must not run any more: one that runs is listed again within seconds. Refused for the
/// host that leads.
#[derive(Debug, clap::Args)]
struct RemoveArgs {
    /// The name of the host
    host: String,

    #[command(flatten)]
    log: Log,
}

pub(super) fn run(args: Args) -> ExitCode {
    match args.command {
        Command::Init(args) => output::finish(async { init(&args).await }),
        Command::Status(args) => output::finish(async { status(&args).await }),
        Command::Check(args) => output::finish(async { examine(&args).await }),
        Command::Handover(args) => output::finish(async { hand_over(&args).await }),
        Command::Upgrade(args) => output::finish(async { raise(&args).await }),
        Command::Remove(args) => output::finish(async { remove(&args).await }),
    }
}

impl Log {
    /// The settings of etcd, and the connections. Must be called within a runtime.
    fn connect(&self) -> Result<(EtcdConfig, Etcd), Failure> {
        let flags = ClusterFlags {
            cluster: self.cluster.clone(),
            cluster_name: self.cluster_name.clone(),
            cluster_ca: self.cluster_ca.clone(),
            cluster_cert: self.cluster_cert.clone(),
            cluster_key: self.cluster_key.clone(),
            cluster_user: self.cluster_user.clone(),
            cluster_password_file: self.cluster_password_file.clone(),
            ..ClusterFlags::default()
        };
        let config = flags.etcd();
        let config = config.map_err(|error| Failure::usage(error.to_string()))?;
        let etcd = connect(&config).map_err(|error| Failure::usage(format!("{error:#}")))?;
        Ok((config, etcd))
    }

    /// The settings of etcd, and the cluster there. Must be called within a runtime.
    fn access(&self) -> Result<(EtcdConfig, Access), Failure> {
        let (config, etcd) = self.connect()?;
        let access = Access::new(Arc::new(etcd), Arc::new(MachineClock), &config.name);
        Ok((config, access))
    }
}

/// The failure of a call to these servers.
fn failed(config: &EtcdConfig, error: &ClusterError) -> Failure {
    match error {
        ClusterError::Engine {
            error: EngineError::Refused(_),
            ..
        } => Failure::transport(error.to_string()),
        ClusterError::Engine {
            error: EngineError::NoSpace,
            ..
        } => Failure::refused(error.to_string()).with("Then run `etcdctl alarm disarm`"),
        ClusterError::Engine { .. } => Failure::transport(format!(
            "etcd at {} does not answer: {error}. Check the addresses with `statehouse cluster check`",
            config.urls.join(", ")
        )),
        ClusterError::NotCreated(_) => Failure::negative(error.to_string()),
        _ => Failure::refused(error.to_string()),
    }
}

/// How long one server of etcd may take to create a cluster.
const CREATION: Duration = Duration::from_secs(4);

async fn init(args: &InitArgs) -> Result<Exit, Failure> {
    let (config, etcd) = args.log.connect()?;
    etcd.check().await.map_err(|error| {
        let urls = config.urls.join(", ");
        Failure::transport(format!("{error} ({urls})"))
    })?;
    let id = Id::random().map_err(|error| Failure::transport(error.to_string()))?;
    let name = &config.name;
    let (created, what) = match &args.from {
        None => {
            let created = create_empty(&etcd, &config, id).await;
            let what = "creating the cluster";
            let failed = |error| failed(&config, &ClusterError::Engine { what, error });
            (created.map_err(failed)?, String::new())
        }
        Some(directory) => {
            let quota_bytes = args.quota.bytes();
            create_from_directory(etcd, &config, id, directory, quota_bytes).await?
        }
    };
    let text = match created {
        true => format!("created the cluster {name}{what}"),
        false => format!("the cluster {name} exists already, and was not changed"),
    };
    if !created && !args.if_missing {
        return Err(Failure::negative(text));
    }
    emit(format!("{text}\n").as_bytes())?;
    Ok(Exit::Done)
}

/// Creates a cluster without a state: each server may be the one that does not answer.
async fn create_empty(etcd: &Etcd, config: &EtcdConfig, id: Id) -> Result<bool, EngineError> {
    let mut result = Err(EngineError::NotApplied("there is no server".to_owned()));
    // An earlier attempt may have been executed without an answer.
    let now_ms = wall_ms();
    for _ in &config.urls {
        let creation = create(etcd, &config.name, id, now_ms);
        result = match timeout(CREATION, creation).await {
            Ok(result @ (Ok(_) | Err(EngineError::NoSpace))) => return result,
            Ok(result) => result,
            Err(_) => Err(EngineError::Unknown(format!(
                "no answer within {CREATION:?}"
            ))),
        };
        etcd.next_endpoint();
    }
    result
}

/// Opens the store of a directory, and locks it. Fails without a change if there is no store.
fn open_store(directory: &Path) -> Result<(Directory, Past), Failure> {
    let unusable = |error: &dyn Display| {
        Failure::usage(format!("{} cannot be used: {error}", directory.display()))
    };
    let is_copy = Past::open(directory)?.mark().is_some();
    let disk = Directory::read_only(directory).map_err(|error| unusable(&error))?;
    if !is_copy && !has_log(&disk).map_err(|error| unusable(&error))? {
        return Err(PastError::NoLog(directory.to_owned()).into());
    }
    // The lock proves that no process changes the store any more.
    let lock = Directory::open(directory).map_err(|error| unusable(&error))?;
    Ok((lock, Past::open(directory)?))
}

/// The bytes of a snapshot of the newest state, and of its policies.
fn measure(past: &Past) -> Result<(u64, u64), Failure> {
    let mut state = past.first_state()?;
    let modules = state.modules.iter().filter_map(|(_, file)| file.as_ref());
    let module_bytes = modules.map(|it| it.len() as u64).sum();
    let (mut bytes, mut block) = (0, Vec::new());
    while state.next(&mut block).map_err(Failure::refused)? {
        // A block follows its length.
        bytes += block.len() as u64 + 4;
        block.clear();
    }
    Ok((bytes, module_bytes))
}

/// What to do about the writes that a copy lacks.
const COPY_ADVICE: &str = ". If another host of that cluster has a copy that ends later, use that one. Start the hosts of the new cluster with new data directories";

/// Creates a cluster with the store of a directory. Returns what it holds, as a phrase.
async fn create_from_directory(
    etcd: Etcd,
    config: &EtcdConfig,
    id: Id,
    directory: &Path,
    quota_bytes: u64,
) -> Result<(bool, String), Failure> {
    let failed = |error: ClusterError| failed(config, &error);
    let access = Access::new(Arc::new(etcd), Arc::new(MachineClock), &config.name);
    // First: if the cluster exists, its hosts may have the directory, or it may be removed.
    match identity(&access).await {
        Err(ClusterError::NotCreated(_)) => {}
        Ok(_) => return Ok((false, String::new())),
        Err(error) => return Err(failed(error)),
    }
    let (lock, past) = open_store(directory)?;
    let sizes = measure(&past)?;
    let checked = check_room(&access, sizes, quota_bytes).await;
    checked.map_err(failed)?;
    let mut state = past.first_state()?;
    let modules = Modules::new(access.clone(), quota_bytes);
    for (digest, file) in std::mem::take(&mut state.modules) {
        match file {
            Some(file) => _ = modules.put(&file).await.map_err(failed)?,
            None => notice(&format!(
                "the file of the policy {digest} is missing: a host leads only with all policies that have a role"
            )),
        }
    }
    let (position, now_ms) = (state.contents.position, state.contents.now_ms);
    data::notice_copy(&past, position, now_ms, COPY_ADVICE);
    let keys = count(state.contents.keys, "key");
    let sessions = count(state.contents.sessions, "session");
    let first = FirstState {
        id,
        now_ms: now_ms.max(wall_ms()),
        position,
        next_block: |block: &mut Vec<u8>| state.next(block),
    };
    let created = create_from(&access, first).await;
    let created = created.map_err(failed)?;
    drop(lock);
    Ok((created, format!(" with {keys} and {sessions}")))
}

async fn status(args: &StatusArgs) -> Result<Exit, Failure> {
    let (config, access) = args.log.access()?;
    let overview = overview(&access, wall_ms()).await;
    let overview = overview.map_err(|error| failed(&config, &error))?;
    emit_either(
        args.json,
        || status_json(&overview),
        || overview.to_string(),
    )?;
    Ok(Exit::Done)
}

fn status_json(it: &Overview) -> Json {
    let head = &it.head;
    let leader = (!head.leader.is_empty() && !head.released).then_some(&head.leader);
    let hosts = it.members.iter().map(|entry| match &entry.info {
        Ok(info) => json!({
            "name": info.host,
            "address": info.address,
            "role": it.role(info),
            "epoch": info.epoch,
            "epochs_behind": it.epochs_behind(info),
            "written_ms": info.written_ms,
            "log_format": info.log_format,
            "version": info.description.version,
            "missing_policies": info.description.missing_modules.len(),
        }),
        Err(error) => json!({"name": entry.host, "error": error.to_string()}),
    });
    json!({
        "store": it.store,
        "leader": leader,
        "address": leader.map(|_| &head.address),
        "successor": head.successor(),
        "epoch": head.epoch,
        "changed_ms": head.now_ms,
        "records": head.position.0,
        "log_format": head.log_format,
        "log_bytes": it.log.bytes,
        "log_frames": it.log.frames,
        "log_frames_since_snapshot": it.log.frames_since_snapshot,
        "snapshot_bytes": head.snapshot.map(|it| it.bytes),
        "snapshot_age_ms": it.log.snapshot_age_ms,
        "etcd": {
            "version": it.status.version,
            "voters": it.status.voters,
            "bytes": it.status.bytes,
            "file_bytes": it.status.file_bytes,
            "alarms": it.status.alarms,
        },
        "hosts": hosts.collect::<Vec<_>>(),
    })
}

async fn examine(args: &CheckArgs) -> Result<Exit, Failure> {
    let (_, access) = args.log.access()?;
    let mut report = check(&access, wall_ms(), args.quota.bytes()).await;
    if let Some((leader, address)) = &report.leader {
        let found = reach(leader, address).await;
        report.findings.push(found);
    }
    emit(report.to_string().as_bytes())?;
    Ok(Exit::of(report.worst() != Severity::Failure))
}

/// Whether the leader accepts other hosts at its address. No failure: this machine may be none of
/// those that must reach it.
async fn reach(leader: &str, address: &str) -> Finding {
    match probe(address).await {
        Ok(()) => Finding {
            severity: Severity::Good,
            measured: format!("{leader} accepts hosts at {address}"),
            advice: String::new(),
        },
        Err(why) => Finding {
            severity: Severity::Warning,
            measured: format!("this machine does not reach {leader} at {address}: {why}"),
            advice: "if the other hosts do not either, they pass no clients on: check its --cluster-address, and the firewalls".to_owned(),
        },
    }
}

async fn hand_over(args: &HandoverArgs) -> Result<Exit, Failure> {
    let path = match &args.host {
        None => "/v1/cluster/handover".to_owned(),
        Some(host) => format!(
            "/v1/cluster/handover?to={}",
            percent::encode(host.as_bytes())
        ),
    };
    let answer = args.store.ask(Method::POST, &path).await?;
    let in_words = |answer: &Json| match (&args.host, answer["changes"].as_bool()) {
        (Some(host), Some(false)) => format!("{host} leads already\n"),
        (Some(host), _) => format!("the host hands over to {host}\n"),
        (None, _) => "the host hands over\n".to_owned(),
    };
    args.store.print(&answer, in_words)
}

async fn raise(args: &UpgradeArgs) -> Result<Exit, Failure> {
    let answer = args.store.ask(Method::POST, "/v1/cluster/upgrade").await?;
    let format = &answer["log_format"];
    args.store
        .print(&answer, |answer| match answer["raised"].as_bool() {
            Some(true) => format!("the hosts may write format {format} of the log from now on\n"),
            _ => format!(
                "the log has format {format}, the newest that the leader knows: nothing to do\n"
            ),
        })
}

async fn remove(args: &RemoveArgs) -> Result<Exit, Failure> {
    let (config, access) = args.log.access()?;
    let (name, host) = (&config.name, &args.host);
    let removed = remove_member(&access, host).await;
    if !removed.map_err(|error| failed(&config, &error))? {
        return Err(Failure::negative(format!(
            "the cluster {name} has no host {host}: `statehouse cluster status` lists its hosts"
        )));
    }
    emit(format!("removed {host} from {name}\n").as_bytes())?;
    Ok(Exit::Done)
}
