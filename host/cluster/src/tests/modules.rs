//! Tests of policy modules that several hosts store at the same time, and of damaged ones.

use tokio::sync::mpsc;

use super::cluster::clock;
use super::operators::{module, remove};
use crate::access::{delete, put};
use crate::keys::Keys;
use crate::simulated::{Faults, World};
use crate::{Access, ClusterError, Modules};

fn modules(world: &World, host: usize) -> Modules {
    let access = Access::new(world.engine(host), clock(), "c");
    Modules::new(access, 2 << 30)
}

/// The keys that transactions write from now on, as soon as they are applied.
fn written(world: &World) -> mpsc::UnboundedReceiver<Vec<u8>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    world.observe(move |it| {
        for (key, _) in &it.puts {
            // The test may look at no further keys.
            let _ = sender.send(key.clone());
        }
    });
    receiver
}

#[tokio::test(start_paused = true)]
async fn module_removed_and_begun_again_is_complete_when_stored() {
    let world = World::new(1, Faults::default());
    let (module, keys) = (module(20 << 20), Keys::new("c"));
    let digest = *blake3::hash(&module).as_bytes();
    let mut keys_written = written(&world);
    let (first, copy) = (modules(&world, 1), module.clone());
    let writing = tokio::spawn(async move { first.put(&copy).await });
    while keys_written.recv().await != Some(keys.module_piece(&digest, 3)) {}
    world.cut(1, true, true);
    remove(&world, &digest).await;
    // The second writer dies right after it has begun.
    let second = modules(&world, 2);
    let begun = async { while keys_written.recv().await != Some(keys.module_begun(&digest)) {} };
    tokio::select! {
        stored = second.put(&module) => panic!("it was complete too early: {stored:?}"),
        () = begun => {}
    }
    world.cut(1, false, false);
    writing.await.unwrap().unwrap();
    let stored = modules(&world, 0).get(&digest).await.unwrap();
    assert!(stored == Some(module), "the module lacks pieces");
}

#[tokio::test(start_paused = true)]
async fn writers_at_the_same_time_share_an_attempt() {
    let world = World::new(1, Faults::default());
    let module = module(5 << 20);
    let writers = [1, 2, 3].map(|host| {
        let (modules, module) = (modules(&world, host), module.clone());
        tokio::spawn(async move { modules.put(&module).await })
    });
    let mut keys_written = written(&world);
    for writer in writers {
        writer.await.unwrap().unwrap();
    }
    let digest = *blake3::hash(&module).as_bytes();
    let attempt = Keys::new("c").module_attempt(&digest);
    let mut attempts = 0;
    while let Ok(key) = keys_written.try_recv() {
        attempts += usize::from(key == attempt);
    }
    assert_eq!(attempts, 1);
    let stored = modules(&world, 0).get(&digest).await.unwrap();
    assert!(stored == Some(module), "the module lacks pieces");
}

#[tokio::test(start_paused = true)]
async fn damaged_module_is_completed_by_the_next_writer() {
    let world = World::new(1, Faults::default());
    let (module, modules) = (module(3 << 20), modules(&world, 0));
    let digest = modules.put(&module).await.unwrap();
    let piece = Keys::new("c").module_piece(&digest, 1);
    let changed = [vec![0_u8; 1 << 20], Vec::new(), vec![0; 3 << 20]];
    let changes = changed.map(|it| put(piece.clone(), it.into()));
    for damage in changes.into_iter().chain([delete(piece)]) {
        world.engine(0).transact(&damage).await.unwrap();
        let error = modules.get(&digest).await.unwrap_err();
        let is_damaged = matches!(error, ClusterError::DamagedModule { .. });
        assert!(is_damaged, "{error}");
        assert_eq!(modules.put(&module).await.unwrap(), digest);
        let stored = modules.get(&digest).await.unwrap();
        assert!(stored.as_ref() == Some(&module), "the module lacks pieces");
    }
}
