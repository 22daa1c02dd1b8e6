//! Which thread notifies of released positions.

use std::sync::Mutex;
use std::thread::{self, ThreadId};
use std::time::Duration;

use super::*;
use crate::limits::NOTIFY_BY_WRITER_US_MAX;
use crate::notifier::Notifier;

/// A log with its notifier, and the recorded notifications.
struct NotifierTest {
    log: Log,
    notifier: Notifier,
    notified: Arc<Mutex<Vec<(u64, ThreadId)>>>,
}

impl NotifierTest {
    fn new() -> Self {
        let (_, log) = new_log(Options::default());
        let notified: Arc<Mutex<Vec<_>>> = Arc::default();
        let listener = Arc::clone(&notified);
        let call = move |position: LogPosition| {
            let mut notified = listener.lock().expect("no panic");
            notified.push((position.0, thread::current().id()));
        };
        let notifier = Notifier::new(Box::new(call), LogPosition::NONE);
        Self {
            log,
            notifier,
            notified,
        }
    }

    /// Does what the writer thread does for a record, if the last notification took `each` per
    /// record.
    fn write(&self, each: Duration) {
        self.log.append(&[b"a record"]).expect("small");
        self.log.commit().expect("no faults");
        self.notifier.replace_per_record(each);
        self.notifier.notify(&self.log);
    }

    /// Does what the notifier thread does when it is woken.
    fn run_notifier_thread(&self) {
        thread::scope(|scope| {
            scope.spawn(|| self.notifier.run());
            self.notifier.close(self.log.released());
        });
    }

    /// The notified positions, and whether the writer thread, which is the current one, called the
    /// listener.
    fn notified(&self) -> Vec<(u64, bool)> {
        let notified = self.notified.lock().expect("no panic");
        let by_writer = |it: &(u64, ThreadId)| (it.0, it.1 == thread::current().id());
        notified.iter().map(by_writer).collect()
    }
}

#[test]
fn writer_notifies_while_notifying_is_fast() {
    let test = NotifierTest::new();
    test.write(Duration::ZERO);
    test.write(Duration::from_micros(NOTIFY_BY_WRITER_US_MAX));
    assert_eq!(test.notified(), [(1, true), (2, true)]);
}

#[test]
fn slow_notification_moves_to_the_notifier_thread() {
    let test = NotifierTest::new();
    let slow = Duration::from_micros(NOTIFY_BY_WRITER_US_MAX * 2 / 3);
    test.write(slow);
    assert_eq!(test.notified(), [(1, true)], "one is quick enough");
    test.log.append(&[b"two at once"]).expect("small");
    test.write(slow);
    assert_eq!(test.notified().len(), 1, "two are not");
    test.run_notifier_thread();
    assert_eq!(test.notified(), [(1, true), (3, false)]);
}

#[test]
fn estimate_of_a_slow_listener_halves_per_call() {
    let test = NotifierTest::new();
    let hour = Duration::from_secs(3600);
    test.write(hour);
    test.run_notifier_thread();
    assert_eq!(test.notified(), [(1, false)]);
    assert_eq!(test.notifier.replace_per_record(Duration::ZERO), hour / 2);
}
