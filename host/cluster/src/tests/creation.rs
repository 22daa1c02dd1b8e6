//! Tests of creations that fail, are repeated, or do not fit.

use super::cluster::{CLUSTER, Host, access, world};
use crate::keys::Keys;
use crate::simulated::{Faults, World};
use crate::{
    ClusterError, Engine, EngineError, FirstState, Id, LogPosition, check_room, create, create_from,
};

#[tokio::test(start_paused = true)]
async fn own_creation_is_recognised_after_a_host_has_led() {
    let world = world(1).await;
    let _leader = Host::lead(&world, "a", |_| {}).await;
    let engine = world.engine(0);
    // An operator repeats an attempt whose answer was lost.
    assert_eq!(create(&*engine, "c", CLUSTER, 0).await, Ok(true));
    assert_eq!(create(&*engine, "c", Id([9; 16]), 0).await, Ok(false));
}

/// A state of some large blocks, and then perhaps an error.
fn state(
    id: u8,
    blocks: usize,
    fails: bool,
) -> FirstState<impl FnMut(&mut Vec<u8>) -> Result<bool, String>> {
    let mut left = blocks;
    FirstState {
        id: Id([id; 16]),
        now_ms: 5_000,
        position: LogPosition(700),
        next_block: move |block: &mut Vec<u8>| {
            if left == 0 {
                return match fails {
                    true => Err("the directory is damaged".to_owned()),
                    false => Ok(false),
                };
            }
            left -= 1;
            block.resize(500_000, 1);
            Ok(true)
        },
    }
}

async fn stored_pieces(engine: &dyn Engine) -> usize {
    let pieces = Keys::new("c").all_snapshots();
    let page = engine.range(&pieces, None, 100).await.unwrap();
    page.values.len()
}

#[tokio::test(start_paused = true)]
async fn failed_creation_leaves_no_pieces() {
    let world = World::new(1, Faults::default());
    let (engine, access) = (world.engine(0), access(&world));
    let failed = create_from(&access, state(1, 2, true)).await;
    assert!(matches!(failed, Err(ClusterError::Input(_))), "{failed:?}");
    assert_eq!(stored_pieces(&*engine).await, 0);

    world.limit(600_000);
    let failed = create_from(&access, state(2, 2, false)).await;
    let is_full = |error: &ClusterError| {
        let ClusterError::Engine { error, .. } = error else {
            return false;
        };
        *error == EngineError::NoSpace
    };
    assert!(failed.as_ref().is_err_and(is_full), "{failed:?}");
    assert!(world.is_full());
    assert_eq!(stored_pieces(&*engine).await, 0);
}

#[tokio::test(start_paused = true)]
async fn failing_state_creates_no_cluster() {
    let world = World::new(1, Faults::default());
    let access = access(&world);
    let too_late = FirstState {
        position: LogPosition(u64::MAX),
        ..state(1, 2, false)
    };
    for state in [too_late, state(1, 0, true)] {
        let position = state.position;
        let failed = create_from(&access, state).await;
        assert!(
            matches!(failed, Err(ClusterError::Input(_))),
            "{position:?}: {failed:?}"
        );
    }
    // A creation by the id of the states would be true also if one of them had created the cluster.
    let created = create(&*world.engine(0), "c", Id([2; 16]), 0).await;
    assert_eq!(created, Ok(true));
}

#[tokio::test(start_paused = true)]
async fn state_must_fit_twice_beside_a_reserve() {
    let world = World::new(1, Faults::default());
    let access = access(&world);
    for (sizes, fits) in [
        ((380, 0), true),
        ((400, 0), false),
        ((300, 150), true),
        ((300, 200), false),
        ((u64::MAX, u64::MAX), false),
    ] {
        let checked = check_room(&access, sizes, 1_000).await;
        assert_eq!(checked.is_ok(), fits, "{sizes:?}: {checked:?}");
    }
    let error = check_room(&access, (400, 0), 1_000).await.unwrap_err();
    assert!(matches!(error, ClusterError::Limit { .. }), "{error}");
    assert!(error.to_string().contains("--cluster-quota"), "{error}");
    // The engine knows its quota better.
    world.limit(2_000);
    check_room(&access, (400, 0), 1_000).await.unwrap();
}
