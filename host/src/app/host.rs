//! A host of a cluster: builds the store of each leadership, and ends it.

mod settings;

use std::sync::Arc;

use anyhow::Context;
use statehouse_cluster::{Description, Ended, Head, Modules as SharedModules};
use statehouse_mqtt::Broker;
use statehouse_precompiled::Modules;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::administration::Administration;
use super::operations::Operations;
use super::present::{Present, Shared, Tasks};
use super::serve::{log_figures, print};
use super::start::{Serving, State, apply, data_directory_of};
use crate::STANDARD_POLICY;
use crate::admin::{Api, DataDirectory, Sources, Subject};
use crate::cluster::log::ClusterLog;
use crate::cluster::modules::Wanted;
use crate::cluster::replica::{Leading, Roles};
use crate::policies::delivery::{Gate, PolicyOrders, Trust};
use crate::policies::manager::{Control, Publish};
use crate::policies::startup::{Keeps, Opening};
use statehouse_access::AccessControl;
use statehouse_access::audit::Audit;
use statehouse_config::{Bounds, ClusterConfig, Config, Followed, PolicyChoice, limits};
use statehouse_core::clock::Clock;
use statehouse_core::log::Image;
use statehouse_core::policy::{Engine, Policy};
use statehouse_core::store::Transaction;
use statehouse_files::watch::Reloads;
use statehouse_listener::front::Role;
use statehouse_server::{Server, traces::Traces};

/// Builds and ends the store of each leadership.
pub(super) struct Host {
    pub(super) config: Arc<Config>,
    pub(super) cluster: ClusterConfig,
    /// The name of the store of the cluster, the target of signed orders. Another cluster with the
    /// same name at another etcd must not carry out the orders of this one.
    pub(super) store: String,
    pub(super) followed: Followed,
    pub(super) trust: Trust,
    pub(super) audit: Arc<Audit>,
    pub(super) access: Arc<AccessControl>,
    pub(super) engine: Arc<Engine<Transaction>>,
    pub(super) standard: Arc<Policy<Transaction>>,
    pub(super) modules: Modules,
    pub(super) shared_modules: SharedModules,
    /// The cluster, for what operators ask.
    pub(super) cluster_access: statehouse_cluster::Access,
    pub(super) wanted: Wanted,
    pub(super) administration: Administration,
    pub(super) reloads: Arc<Reloads>,
    pub(super) shared: Arc<Shared>,
    pub(super) traces: Option<Arc<Traces>>,
}

impl Host {
    /// The built-in policy of the log: that of this program, or of another version of it.
    fn built_in(&self, image: &Image) -> anyhow::Result<(Arc<Policy<Transaction>>, Vec<u8>)> {
        let recorded = (image.assignment.as_ref()).map(|it| it.built_in.0);
        match recorded.filter(|digest| *digest != self.standard.digest) {
            None => Ok((self.standard.clone(), STANDARD_POLICY.to_vec())),
            Some(digest) => {
                let file = self.modules.load(&digest).with_context(|| {
                    format!("the built-in policy {digest} of the cluster cannot be read")
                })?;
                Ok((Arc::new(self.engine.load(&file)?), file))
            }
        }
    }

    /// Gives the file of a policy to the other hosts, and removes files that no policy needs if
    /// there are many. Called by threads that may block, one at a time.
    fn publisher(&self, server: &Arc<Server>, log: &ClusterLog) -> Publish {
        let (modules, runtime) = (self.shared_modules.clone(), Handle::current());
        let (server, log) = (server.clone(), log.clone());
        let needed = move || {
            server
                .needed_policies()
                .into_iter()
                .map(Into::into)
                .collect()
        };
        Box::new(move |file| {
            runtime.block_on(async {
                let unneeded = modules.unneeded(file, &needed).await;
                let unneeded = unneeded.map_err(std::io::Error::other)?;
                if !unneeded.is_empty() {
                    let removed = log.leader().remove_modules(&unneeded).await;
                    removed.map_err(std::io::Error::other)?;
                    let modules = unneeded.len();
                    tracing::info!(modules, "removed policy modules without a use from etcd");
                }
                let stored = modules.put(file).await;
                stored.map(|_| ()).map_err(std::io::Error::other)
            })
        })
    }

    /// The limits that are in force now.
    fn bounds(&self) -> Bounds {
        match &self.followed {
            Some(followed) => (*followed.current()).clone(),
            None => self.config.bounds.clone(),
        }
    }

    fn begin_tasks(
        &self,
        server: &Arc<Server>,
        broker: &Broker,
        log: &ClusterLog,
    ) -> Vec<AbortHandle> {
        let sweeper = tokio::spawn({
            let (server, lease) = (server.clone(), Arc::new(log.clone()));
            async move { server.sweep(Some(lease)).await }
        });
        let timers = tokio::spawn({
            let broker = broker.clone();
            async move { broker.run_timers().await }
        });
        vec![sweeper.abort_handle(), timers.abort_handle()]
    }

    fn say(&self, line: String) {
        tracing::info!("{line}");
        print(&[line]);
    }
}

impl Roles for Host {
    fn empty(&self) -> Image {
        // Without limits for sessions: those of another host, which may be larger, were in force.
        Image::new(self.config.storage.duplicates)
    }

    fn may_lead(&self, image: &Image) -> Result<(), String> {
        self.wanted.check(image)
    }

    fn describe(&self, image: &Image) -> Description {
        Description {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings: settings::digest(&self.config),
            missing_modules: self.wanted.missing(image).map(Into::into).collect(),
        }
    }

    fn name(&mut self, image: &Image) {
        self.wanted.name(image);
    }

    fn follow(&mut self, head: &Head) {
        let name = &self.cluster.etcd.name;
        // A leader with the name of this host may be an earlier process, or another host that has
        // the name too. Its address tells them apart: that of this host answers that it does not
        // lead.
        if head.released || head.leader.is_empty() {
            self.shared.role.send_replace(Role::Waiting);
            self.shared.waits();
            return;
        }
        let (leader, address) = (head.leader.clone(), head.address.clone());
        self.say(format!("following {leader} of {name}"));
        tokio::spawn(settings::compare(
            self.cluster_access.clone(),
            head.clone(),
            settings::digest(&self.config),
        ));
        let answer = format!(
            "this host follows {leader} of the cluster {name}: use the admin API of {leader}"
        );
        self.shared.follows(&leader, &answer);
        self.shared
            .role
            .send_replace(Role::Following { leader, address });
    }

    fn lead(&mut self, image: Image, log: ClusterLog, clock: Clock) -> anyhow::Result<Leading> {
        let (standard, standard_file) = self.built_in(&image)?;
        let opening = Opening {
            engine: &self.engine,
            standard: &standard,
            standard_file: &standard_file,
            modules: &self.modules,
            trust: &self.trust,
            keeps: Keeps::Files,
        };
        let (registry, named) = opening.registry(&PolicyChoice::Last, &image)?;
        let state = State {
            registry,
            named,
            image,
        };
        let epoch = log.leader().epoch();
        let (bounds, journal) = (self.bounds(), Arc::new(log.clone()));
        let serving = Serving::begin(&self.config, &bounds, state, journal, clock, true);
        let server = serving.server.clone();
        server.set_audit(self.audit.clone());
        if let Some(traces) = &self.traces {
            server.set_traces(traces.clone());
        }
        let (cluster, host) = (&self.cluster.etcd.name, &self.cluster.host);
        let control = Control::new(
            server.clone(),
            self.engine.clone(),
            Some(self.modules.clone()),
            Some(self.publisher(&server, &log)),
            self.store.clone(),
        );
        let gate = Arc::new(Gate::new(control, self.trust.clone()));
        let orders = PolicyOrders::new(gate.clone(), self.audit.clone());
        let broker = serving.through_embedded_broker(
            bounds.broker.clone(),
            Some(Arc::new(log.clone())),
            Some(Arc::new(log.clone())),
            orders.clone(),
            &self.access,
        );
        let tasks = Tasks {
            serving: self.begin_tasks(&server, &broker, &log),
            _deliveries: (self.administration).deliver(&gate, &orders, Some(broker.clone())),
        };
        let sources = Sources {
            server: server.clone(),
            broker: Some(broker.clone()),
            access: self.access.clone(),
            reloads: self.reloads.clone(),
            audit: self.audit.clone(),
            directory: Some(DataDirectory {
                copied: Some(self.shared.history.clone()),
                ..data_directory_of(&self.config)
            }),
            disk: None,
            leadership: Some(Arc::new(Operations {
                log: log.clone(),
                shared: self.shared.clone(),
                access: self.cluster_access.clone(),
                cluster: cluster.clone(),
                host: host.clone(),
            })),
        };
        let api = Arc::new(Api::new(gate, sources));
        self.say(format!("{host} leads {cluster} (epoch {epoch})"));
        self.shared.present.send_replace(Some(Present {
            server: server.clone(),
            broker: broker.clone(),
            log,
            tasks: Arc::new(tasks),
        }));
        // A change of the limits since then found no store.
        apply(&self.bounds(), &server, Some(&broker));
        self.shared.subject.send_replace(Subject::Store(api));
        self.shared.role.send_replace(Role::Leading(broker.clone()));
        Ok(Leading { server, broker })
    }

    fn end(&mut self, leading: Leading, ended: Ended) {
        let Leading { server, broker } = leading;
        // What waits for a record to become durable must not wait for ever.
        server.stop();
        // Clients that connect from now on wait for the next leader.
        self.shared.role.send_replace(Role::Waiting);
        self.shared.waits();
        let present = self.shared.present.send_replace(None);
        drop(present);
        log_figures(&server);
        let (cluster, host) = (&self.cluster.etcd.name, &self.cluster.host);
        let what = match ended {
            Ended::Deposed => "another host took over",
            Ended::HandedOver => "it handed over",
        };
        self.say(format!("{host} does not lead {cluster} any more: {what}"));
        tokio::spawn(async move { broker.shutdown(limits::CLUSTER_LEAVING_GRACE).await });
    }
}
