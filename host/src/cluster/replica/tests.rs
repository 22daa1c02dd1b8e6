//! Tests of what keeps a host from leading.

use statehouse_cluster::Id;
use statehouse_core::clock::ManualSource;
use statehouse_core::store::Retention;

use super::*;
use statehouse_listener::front::Times;

/// A host that has every policy.
struct Follower;

impl Roles for Follower {
    fn empty(&self) -> Image {
        Image::new(Retention::default())
    }

    fn may_lead(&self, _image: &Image) -> Result<(), String> {
        Ok(())
    }

    fn name(&mut self, _image: &Image) {}

    fn describe(&self, _image: &Image) -> Description {
        Description::default()
    }

    fn follow(&mut self, _head: &Head) {}

    fn lead(&mut self, _: Image, _: ClusterLog, _: Clock) -> anyhow::Result<Leading> {
        anyhow::bail!("a test has no store")
    }

    fn end(&mut self, _leading: Leading, _ended: Ended) {}
}

fn replica(accepts_clock: bool) -> Replica<Follower> {
    Replica::new(Follower, accepts_clock, Arc::default())
}

/// A head whose last frame was written so much later than this host's clock shows.
fn head(later_ms: u64) -> Head {
    Head {
        leader: "gw1".into(),
        ..Head::first(Id::default(), wall_ms() + later_ms)
    }
}

/// Far beyond the limit, since the test itself takes time.
const OFF_MS: u64 = 10_000;

#[test]
fn host_whose_clock_agrees_with_the_log_may_lead() {
    assert_eq!(replica(false).may_lead(&head(0)), Ok(()));
    let almost_ms = limits::CLUSTER_CLOCK_OFFSET_MS_MAX;
    assert_eq!(replica(false).may_lead(&head(almost_ms)), Ok(()));
}

#[test]
fn host_whose_clock_is_behind_the_log_may_not_lead() {
    let refused = replica(false).may_lead(&head(OFF_MS)).unwrap_err();
    assert!(refused.contains("ms behind the log"), "{refused}");
    assert!(refused.contains("--accept-clock"), "{refused}");
    // The last frame can be older than the last record, whose time never steps back.
    let mut behind = replica(false);
    behind.image.now_ms = wall_ms() + OFF_MS;
    let refused = behind.may_lead(&head(0)).unwrap_err();
    assert!(refused.contains("ms behind the log"), "{refused}");
    assert_eq!(replica(true).may_lead(&head(OFF_MS)), Ok(()));
}

#[test]
fn host_whose_clock_is_ahead_of_its_leader_may_not_lead() {
    let ahead = |accepts_clock, ahead_ms| {
        let mut replica = replica(accepts_clock);
        replica.following(&head(0));
        for _ in 0..3 {
            let (wall_ms, now) = (wall_ms(), MachineClock.now());
            let offset = &mut replica.offset.locked();
            offset.received(wall_ms - ahead_ms, wall_ms, now);
        }
        replica.may_lead(&head(0))
    };
    assert_eq!(
        ahead(false, limits::CLUSTER_CLOCK_OFFSET_MS_MAX / 2),
        Ok(())
    );
    let refused = ahead(false, OFF_MS).unwrap_err();
    assert!(
        refused.contains("ms ahead of that of the last leader, gw1"),
        "{refused}"
    );
    assert_eq!(ahead(true, OFF_MS), Ok(()));
}

/// The clock of the leader was ahead for a moment, so the log still is.
#[test]
fn host_whose_clock_agrees_with_the_leader_may_lead() {
    let behind = |leader_ms| {
        let mut replica = replica(false);
        replica.offset.compare(Times {
            store_ms: wall_ms() + OFF_MS,
            wall_ms: leader_ms,
        });
        replica.may_lead(&head(OFF_MS))
    };
    assert_eq!(behind(wall_ms()), Ok(()));
    for leader_ms in [wall_ms() + OFF_MS, wall_ms() - OFF_MS] {
        let refused = behind(leader_ms).unwrap_err();
        assert!(refused.contains("ms behind the log"), "{refused}");
    }
}

/// Both clocks are ahead of the store's time, so deadlines would be over too early.
#[test]
fn host_ahead_of_the_store_may_not_lead_even_if_its_leader_is() {
    let mut replica = replica(false);
    replica.offset.compare(Times {
        store_ms: wall_ms() - OFF_MS,
        wall_ms: wall_ms(),
    });
    let refused = replica.may_lead(&head(0)).unwrap_err();
    assert!(refused.contains("ms ahead of that"), "{refused}");
}

#[test]
fn store_begins_at_the_last_time_of_the_log_and_the_time_since() {
    let (last_ms, since) = (wall_ms(), Duration::from_secs(5));
    let mut replica = replica(false);
    let mut image = replica.roles.empty();
    let previous = |now_ms| Head::first(Id::default(), now_ms);
    let begins_ms = replica.begins_ms(&previous(last_ms), since, &image);
    assert_eq!(begins_ms, last_ms + 5_000);
    // No time has passed since the opening record, which has the time of this host's clock.
    replica.opening(1);
    image.now_ms = last_ms + 5_000;
    let begins_ms = replica.begins_ms(&previous(last_ms), since, &image);
    assert_eq!(begins_ms, last_ms + 5_000);
    // The last record can be later than the last head that an earlier version wrote.
    replica.image.now_ms = last_ms + OFF_MS;
    replica.opening(1);
    image.now_ms = last_ms + OFF_MS;
    let begins_ms = replica.begins_ms(&previous(last_ms), since, &image);
    assert_eq!(begins_ms, last_ms + OFF_MS + 5_000);
}

/// The heads of a leader show the next one which time clients have read.
#[test]
fn time_of_a_leader_is_that_of_its_store() {
    let mut replica = replica(false);
    assert!(replica.now_ms() >= wall_ms() - OFF_MS);
    // The clock of the leader was an hour ahead for a moment.
    let source = Arc::new(ManualSource::at(1_000_000));
    let mut clock = Clock::resume(source.clone(), 4_600_000);
    replica.store_ms = Some(clock.shown());
    assert_eq!(replica.now_ms(), 4_600_000);
    // No later time than the store has read.
    source.advance(16_000);
    assert_eq!(replica.now_ms(), 4_600_000);
    assert_eq!(clock.read().now_ms, replica.now_ms());
    replica.ended(Ended::Deposed);
    assert!(replica.now_ms() >= wall_ms() - OFF_MS);
}
