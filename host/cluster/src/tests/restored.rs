//! The engine was restored from an older state, and another host has led since.

use super::cluster::{Host, head, world};
use crate::access::put;
use crate::head::Chain;
use crate::keys::Keys;
use crate::{Head, Id, Stop};

#[tokio::test(start_paused = true)]
async fn hosts_stop_if_the_log_continues_an_older_state() {
    let world = world(1).await;
    let (leader, log) = Host::lead(&world, "a", |_| {}).await;
    let follower = Host::start(&world, "b", |_| {});
    Host::append(&log, b"kept").await;
    let older = head(&world).await;
    let mut last = older.position;
    for _ in 0..3 {
        last = Host::append(&log, b"lost").await;
    }
    follower.receives(last).await;
    let newer = Head {
        epoch: older.epoch + 1,
        change: 0,
        writer: Id([9; 16]),
        leader: "c".into(),
        seq: older.seq + 1,
        chain: Chain([7; 32]),
        ..older
    };
    let campaign = put(Keys::new("c").head(), newer.encode().into());
    world.engine(0).transact(&campaign).await.unwrap();
    log.append(&[b"next"]).unwrap();
    for host in [follower, leader] {
        let stop = host.stops().await;
        assert!(matches!(stop, Stop::Branched { .. }), "{stop}");
    }
}
