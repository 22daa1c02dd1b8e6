//! What a write waits for: those who are just being told may come again, and one sync is enough for all of them.

use std::sync::Mutex;
use std::thread;

use super::*;
use crate::limits::{COMPANY_BYTES_MAX, TOLD_BY_WRITER_MAX};
use crate::teller::Teller;
use crate::writer::wait_for_work;

fn log() -> Log {
    let (log, ..) = open(&Simulation::new(1), Options::default()).expect("opens");
    log
}

#[test]
fn a_write_waits_until_as_many_have_come_as_were_told() {
    let log = log();
    log.pending().awaited = 3;
    log.append(&[b"one"]).expect("small");
    assert!(log.pending().awaits_company());
    log.append(&[b"two", b"three"]).expect("small");
    assert!(!log.pending().awaits_company());
    wait_for_work(&log, None);
    assert_eq!(log.pending().awaited, 3, "it did not give up");
}

#[test]
fn a_write_waits_for_nobody_where_there_is_much() {
    let log = log();
    log.pending().awaited = 1_000;
    log.append(&[&[1; COMPANY_BYTES_MAX]]).expect("fits");
    wait_for_work(&log, None);
    assert_eq!(log.pending().awaited, 1_000, "it did not give up");
}

#[test]
fn a_write_waits_only_a_moment_for_those_who_do_not_come() {
    let log = log();
    log.pending().awaited = 2;
    log.append(&[b"one"]).expect("small");
    wait_for_work(&log, None);
    assert_eq!(log.pending().awaited, 0);
}

/// Or two halves of all clients would take turns for ever.
#[test]
fn those_who_wait_already_wait_for_those_who_are_told() {
    let log = log();
    let teller = Teller::new(Box::new(|_| {}), Position::NONE);
    let many = TOLD_BY_WRITER_MAX + 1;
    for _ in 0..many {
        log.append(&[b"told"]).expect("small");
    }
    log.commit().expect("no faults");
    for _ in 0..many {
        log.append(&[b"waiting"]).expect("small");
    }
    teller.tell(&log);
    assert!(log.pending().awaits_company());
    for _ in 0..many {
        log.append(&[b"again"]).expect("small");
    }
    assert!(!log.pending().awaits_company());
}

#[test]
fn a_write_waits_no_longer_than_the_telling_takes() {
    let log = Arc::new(log());
    let told = Arc::new(Mutex::new(Vec::new()));
    let (listener, listening) = (Arc::clone(&told), Arc::clone(&log));
    let call = move |position: Position| {
        let awaited = listening.pending().awaited;
        listener
            .lock()
            .expect("no panic")
            .push((position.0, awaited));
    };
    let teller = Teller::new(Box::new(call), Position::NONE);
    let many = TOLD_BY_WRITER_MAX + 1;
    for _ in 0..many {
        log.append(&[b"many"]).expect("small");
    }
    log.commit().expect("no faults");
    teller.tell(&log);
    assert_eq!(log.pending().awaited, many);
    thread::scope(|scope| {
        scope.spawn(|| teller.run(&log));
        teller.close(log.released());
    });
    assert_eq!(log.pending().awaited, 0);

    // A few are told at once, while nobody writes.
    log.append(&[b"few"]).expect("small");
    log.commit().expect("no faults");
    teller.tell(&log);
    assert_eq!(log.pending().awaited, 0);
    assert_eq!(
        *told.lock().expect("no panic"),
        [(many, many), (many + 1, 0)]
    );
}
