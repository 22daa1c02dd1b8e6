//! Which thread tells what is released.

use std::sync::Mutex;
use std::thread::{self, ThreadId};
use std::time::Duration;

use super::*;
use crate::limits::TOLD_BY_WRITER_US_MAX;
use crate::teller::Teller;

/// A log, its teller, and what was told by whom.
struct Scene {
    log: Log,
    teller: Teller,
    told: Arc<Mutex<Vec<(u64, ThreadId)>>>,
}

impl Scene {
    fn new() -> Self {
        let (log, ..) = open(&Simulation::new(1), Options::default()).expect("opens");
        let told: Arc<Mutex<Vec<_>>> = Arc::default();
        let listener = Arc::clone(&told);
        let call = move |position: LogPosition| {
            let mut told = listener.lock().expect("no panic");
            told.push((position.0, thread::current().id()));
        };
        let teller = Teller::new(Box::new(call), LogPosition::NONE);
        Self { log, teller, told }
    }

    /// What the writing thread does for a record, where telling of one took so long the last time.
    fn write(&self, each: Duration) {
        self.log.append(&[b"a record"]).expect("small");
        self.log.commit().expect("no faults");
        self.teller.replace_each(each);
        self.teller.tell(&self.log);
    }

    /// What the telling thread does once it is woken.
    fn run_the_thread(&self) {
        thread::scope(|scope| {
            scope.spawn(|| self.teller.run());
            self.teller.close(self.log.released());
        });
    }

    /// Positions that were told, and whether by the writing thread, which is this.
    fn told(&self) -> Vec<(u64, bool)> {
        let told = self.told.lock().expect("no panic");
        let by_writer = |it: &(u64, ThreadId)| (it.0, it.1 == thread::current().id());
        told.iter().map(by_writer).collect()
    }
}

#[test]
fn who_has_synced_tells_while_that_is_quick() {
    let scene = Scene::new();
    scene.write(Duration::ZERO);
    scene.write(Duration::from_micros(TOLD_BY_WRITER_US_MAX));
    assert_eq!(scene.told(), [(1, true), (2, true)]);
}

#[test]
fn telling_that_would_take_long_is_left_to_a_thread_of_its_own() {
    let scene = Scene::new();
    let slow = Duration::from_micros(TOLD_BY_WRITER_US_MAX * 2 / 3);
    scene.write(slow);
    assert_eq!(scene.told(), [(1, true)], "one is quick enough");
    scene.log.append(&[b"two at once"]).expect("small");
    scene.write(slow);
    assert_eq!(scene.told().len(), 1, "two are not");
    scene.run_the_thread();
    assert_eq!(scene.told(), [(1, true), (3, false)]);
}

#[test]
fn a_listener_that_was_slow_is_trusted_again_little_by_little() {
    let scene = Scene::new();
    let hour = Duration::from_secs(3600);
    scene.write(hour);
    scene.run_the_thread();
    assert_eq!(scene.told(), [(1, false)]);
    assert_eq!(scene.teller.replace_each(Duration::ZERO), hour / 2);
}
