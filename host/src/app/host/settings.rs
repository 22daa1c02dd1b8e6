//! The settings that must agree on all hosts of a cluster, and their comparison with those of the
//! leader. A difference stops no host: a cluster is updated host by host.

use statehouse_cluster::{AGREEING_SETTINGS, Access, Head, members};
use statehouse_config::{Config, limits};

/// How often a follower looks for the record that the leader writes when it begins to lead.
const ATTEMPTS: usize = 10;

/// A digest of the settings that change answers, and so must agree on all hosts
/// ([`AGREEING_SETTINGS`]). Limits may differ, since they follow the memory of each machine.
pub(super) fn digest(config: &Config) -> [u8; 32] {
    let Config {
        node,
        dialect,
        policy_property,
        traces,
        ..
    } = config;
    // Without traces the digest is that of versions that have none.
    let traces = traces.as_ref().map_or("", |_| " traces");
    blake3::hash(format!("{node:?} {dialect:?} {policy_property}{traces}").as_bytes()).into()
}

/// Warns if the leader that `head` names has recorded other settings than `own`. Ends without a
/// warning if there is no record of that leadership after [`ATTEMPTS`].
pub(super) async fn compare(access: Access, head: Head, own: [u8; 32]) {
    for _ in 0..ATTEMPTS {
        let listed = members(&access).await;
        let mut infos = listed.into_iter().flatten().filter_map(|it| it.info.ok());
        if let Some(leader) = infos.find(|it| it.host == head.leader && it.epoch == head.epoch) {
            if leader.description.settings != own {
                tracing::warn!(
                    "the leader {} has other settings than this host, so a redelivered request may get another response after a takeover: give all hosts the same {AGREEING_SETTINGS}",
                    head.leader
                );
            }
            return;
        }
        tokio::time::sleep(limits::CLUSTER_START_RETRY).await;
    }
}
