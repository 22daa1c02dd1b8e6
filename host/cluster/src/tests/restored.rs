//! The engine was restored from an older state, and another host has led since.

use bytes::Bytes;

use super::cluster::{Host, simulate, world};
use crate::head::Chain;
use crate::keys::Keys;
use crate::{Head, Id, Stop};

/// In an earlier version the leader joined the older state and dropped acknowledged writes, and a
/// follower never led again.
#[test]
fn hosts_stop_if_the_log_continues_an_older_state() {
    simulate(async {
        let world = world(1).await;
        let (leader, log) = Host::lead(&world, "a", |_| {}).await;
        let follower = Host::start(&world, "b", |_| {});
        let (engine, key) = (world.engine(0), Keys::new("c").head());
        Host::append(&log, b"kept").await;
        let older = engine.get(&key).await.unwrap().value.unwrap();
        let older = Head::decode(&older).unwrap();
        let mut last = older.position;
        for _ in 0..3 {
            last = Host::append(&log, b"lost").await;
        }
        follower
            .wait(|it| it.records.iter().find(|(at, _)| *at == last.0).map(|_| ()))
            .await;
        let newer = Head {
            epoch: older.epoch + 1,
            change: 0,
            writer: Id([9; 16]),
            leader: "c".into(),
            seq: older.seq + 1,
            chain: Chain([7; 32]),
            ..older
        };
        let puts = vec![(key.clone(), Bytes::from(newer.encode()))];
        let campaign = crate::access::always(key, puts, Vec::new());
        engine.transact(&campaign).await.unwrap();
        log.append(&[b"next"]).unwrap();
        for host in [follower, leader] {
            let stop = host.stops().await;
            assert!(matches!(stop, Stop::Branched { .. }), "{stop}");
        }
    });
}
