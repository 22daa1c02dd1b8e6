//! The requests in flight of one connection, and their outcomes.
//!
//! A conversation does no I/O and reads no clock: the time and the bytes are arguments. Each
//! request in flight has a slot. A slot must become free only when its request is both answered and
//! acknowledged, because the slot determines the packet id.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::pace::{Schedule, Turns};
use super::protocol::{Broken, Protocol, Received};
use super::run::Run;
use super::tally::Tally;
use super::work::{Reply, Request, Source, Verb};
use crate::limits;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    request: Request,
    number: u64,
    since: Instant,
    unanswered: bool,
    unacknowledged: bool,
    /// The request already counts as an error, so its answer does not count.
    failed: bool,
}

/// The requests of one connection.
pub(super) struct Conversation<P> {
    protocol: P,
    run: Arc<Run>,
    tally: Rc<RefCell<Tally>>,
    source: Source,
    /// Only in an open loop.
    turns: Option<Turns>,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// The number of requests that were sent.
    sent: u64,
    exhausted: bool,
    /// Bytes to write to the socket.
    pub(super) out: Vec<u8>,
}

impl<P: Protocol> Conversation<P> {
    /// Creates a conversation with at most `in_flight` requests in flight.
    pub(super) fn new(
        protocol: P,
        run: Arc<Run>,
        tally: Rc<RefCell<Tally>>,
        source: Source,
        turns: Option<Turns>,
        in_flight: u16,
    ) -> Self {
        let never = Slot {
            request: Request {
                verb: Verb::Get,
                key: 0,
            },
            number: 0,
            since: run.schedule.begin,
            unanswered: false,
            unacknowledged: false,
            failed: false,
        };
        Self {
            protocol,
            run,
            tally,
            source,
            turns,
            slots: vec![never; usize::from(in_flight)],
            // Slots are taken from the end, so the lowest is the first.
            free: (0..in_flight).rev().collect(),
            sent: 0,
            exhausted: false,
            out: Vec::new(),
        }
    }

    /// Writes all requests that are due and have a free slot.
    pub(super) fn send(&mut self, now: Instant) {
        let (schedule, until) = (self.run.schedule, self.run.until());
        while self.out.len() < limits::LOAD_OUTPUT_BYTES_HIGH
            && !self.exhausted
            && let Some(slot) = self.free.last().copied()
        {
            let since = match self.turns {
                None => now,
                Some(turns) => schedule.begin + turns.due(self.sent),
            };
            // Also if no further request is due in the window: the run lasts until its end.
            if since > now && now < until {
                return;
            }
            let request = match since < until {
                true => self.source.next(),
                false => None,
            };
            let Some(request) = request else {
                self.exhausted = true;
                return;
            };
            self.free.pop();
            self.protocol.ask(slot, self.sent, request, &mut self.out);
            self.slots[usize::from(slot)] = Slot {
                request,
                number: self.sent,
                since,
                unanswered: true,
                unacknowledged: P::ACKNOWLEDGES,
                failed: false,
            };
            self.sent += 1;
            let mut tally = self.tally.borrow_mut();
            tally.sent += 1;
            if schedule.has(since) {
                tally.requests += 1;
                if self.turns.is_some() {
                    tally.late.note(now.saturating_duration_since(since));
                }
            }
        }
    }

    /// Handles the complete packets in `bytes`, and returns their length.
    pub(super) fn read(&mut self, bytes: &[u8], now: Instant) -> Result<usize, Broken> {
        let Self {
            protocol,
            run,
            tally,
            slots,
            free,
            out,
            ..
        } = self;
        let mut tally = tally.borrow_mut();
        protocol.read(bytes, out, |message| match message {
            Received::Answer {
                slot: at,
                number,
                reply,
            } => match slots.get_mut(usize::from(at)) {
                Some(slot) if slot.unanswered && slot.number == number => {
                    slot.unanswered = false;
                    tally.replied += 1;
                    if !slot.failed {
                        answered(run, &mut tally, slot, reply, now);
                    }
                    if !slot.unacknowledged {
                        free.push(at);
                    }
                }
                _ => run.fail(&mut tally, "an unexpected answer", None),
            },
            Received::Acknowledged { slot: at, refused } => match slots.get_mut(usize::from(at)) {
                Some(slot) if slot.unacknowledged => {
                    slot.unacknowledged = false;
                    if let Some(why) = refused {
                        if slot.unanswered && !slot.failed {
                            run.fail(&mut tally, &why, Some(slot.since));
                        }
                        slot.unanswered = false;
                    }
                    if !slot.unanswered {
                        free.push(at);
                    }
                }
                _ => run.fail(&mut tally, "an unexpected acknowledgement", None),
            },
            Received::Ready => {}
            Received::Notification(_) | Received::Unknown => {
                run.fail(&mut tally, "an unexpected message", None);
            }
        })
    }

    /// Fails the requests whose answer is overdue.
    pub(super) fn check_timeouts(&mut self, now: Instant) {
        let timeout = self.run.timeout;
        let why = format!("no answer within {timeout:?}");
        self.fail_requests(&why, |slot| {
            now.saturating_duration_since(slot.since) >= timeout
        });
    }

    /// Whether there is nothing left to send or to wait for.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.exhausted && self.free.len() == self.slots.len()
            || now >= self.run.until() + self.run.timeout
            || self.run.is_aborted()
    }

    /// Ends the conversation because the connection was lost or the run is over. Fails the requests
    /// that are not answered, and counts those that were due and not sent.
    pub(super) fn end(&mut self, lost: Option<&str>, now: Instant) {
        if lost.is_none() && self.run.is_aborted() {
            // The error that aborted the run is already counted. The other requests in flight are
            // no errors.
            return;
        }
        let overdue = format!("no answer within {:?}", self.run.timeout);
        let count = self.fail_requests(lost.unwrap_or(&overdue), |_| true);
        let mut tally = self.tally.borrow_mut();
        if let Some(why) = lost
            && count == 0
        {
            // No request was in flight, so no other error reports the loss.
            self.run.fail(&mut tally, why, None);
        }
        let Some(turns) = self.turns else {
            return;
        };
        let Schedule { begin, from, .. } = self.run.schedule;
        let until = self.run.until();
        let before = |time: Instant| turns.before(time.saturating_duration_since(begin));
        let due = before(until.min(now));
        let measured = due.saturating_sub(self.sent.max(before(from)));
        tally.requests += measured;
        tally.failed += measured;
        tally
            .errors
            .note("not sent in time", due.saturating_sub(self.sent));
    }

    /// Counts the requests in flight that `which` selects as errors, and returns their number.
    fn fail_requests(&mut self, why: &str, which: impl Fn(&Slot) -> bool) -> usize {
        let mut tally = self.tally.borrow_mut();
        let mut count = 0;
        for slot in &mut self.slots {
            if slot.unanswered && !slot.failed && which(slot) {
                slot.failed = true;
                count += 1;
                self.run.fail(&mut tally, why, Some(slot.since));
            }
        }
        count
    }

    pub(super) fn ping(&mut self) {
        self.protocol.ping(&mut self.out);
    }

    pub(super) fn bye(&mut self) {
        self.protocol.bye(&mut self.out);
    }
}

fn answered(run: &Run, tally: &mut Tally, slot: &Slot, reply: Reply<'_>, now: Instant) {
    if !run.catalogue.is_correct(slot.request, reply) {
        let why = match reply {
            Reply::Refused(text) => format!("refused: {}", String::from_utf8_lossy(text)),
            _ => "a wrong answer".to_owned(),
        };
        run.fail(tally, &why, Some(slot.since));
        return;
    }
    run.succeed(slot.request);
    if run.schedule.has(now) {
        tally.arrived += 1;
        tally.arrived_reads += u64::from(slot.request.verb == Verb::Get);
    }
    if run.schedule.has(slot.since) {
        tally.answered += 1;
        let latency = now.saturating_duration_since(slot.since);
        tally.of(slot.request.verb).note(latency);
        if slot.request.verb == Verb::Get && reply == Reply::Nothing {
            tally.misses += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::work::{Catalogue, Job};
    use crate::{Pace, Plan};

    const MS: Duration = Duration::from_millis(1);

    /// A protocol whose packets are single bytes: the lower four bits are the slot, the upper four
    /// the number.
    struct Bytes {
        reply: Reply<'static>,
    }

    impl Protocol for Bytes {
        const ACKNOWLEDGES: bool = false;
        fn hello(&mut self, _: &mut Vec<u8>) {}
        fn in_flight_max(&self) -> u16 {
            8
        }
        fn ask(&mut self, slot: u16, number: u64, _: Request, out: &mut Vec<u8>) {
            out.push(slot as u8 | (number as u8) << 4);
        }
        fn read(
            &mut self,
            bytes: &[u8],
            _: &mut Vec<u8>,
            mut receive: impl FnMut(Received<'_>),
        ) -> Result<usize, Broken> {
            for byte in bytes {
                receive(Received::Answer {
                    slot: u16::from(byte & 15),
                    number: u64::from(byte >> 4),
                    reply: self.reply,
                });
            }
            Ok(bytes.len())
        }
        fn ping(&mut self, _: &mut Vec<u8>) {}
        fn bye(&mut self, _: &mut Vec<u8>) {}
    }

    fn conversation(per_second: Option<f64>, in_flight: u16) -> (Conversation<Bytes>, Instant) {
        conversation_of(Job::Mix { reads: 0 }, per_second, in_flight)
    }

    /// Warms up for 10 ms and measures for 100 ms.
    fn conversation_of(
        job: Job,
        per_second: Option<f64>,
        in_flight: u16,
    ) -> (Conversation<Bytes>, Instant) {
        let begin = Instant::now();
        let schedule = Schedule {
            begin,
            from: begin + 10 * MS,
            until: begin + 110 * MS,
        };
        let plan = Plan {
            address: ([127, 0, 0, 1], 1883).into(),
            encryption: None,
            job,
            pace: Pace::Closed,
            connections: 1,
            in_flight: None,
            watchers: 0,
            keys: 10,
            catalogue: Arc::new(Catalogue::new(1)),
            seed: 1,
            warm_up: 10 * MS,
            duration: 100 * MS,
            timeout: 50 * MS,
            threads: 1,
            pid: None,
        };
        let run = Arc::new(Run::new(&plan, schedule));
        let source = Source::new(job, 10, 1, 0, 1);
        let turns = per_second.map(|rate| Turns::new(rate, 0, 1));
        let tally = Rc::default();
        let protocol = Bytes { reply: Reply::Done };
        (
            Conversation::new(protocol, run, tally, source, turns, in_flight),
            begin,
        )
    }

    #[test]
    fn closed_loop_sends_the_next_request_after_an_answer() {
        let (mut it, begin) = conversation(None, 2);
        it.send(begin + 20 * MS);
        assert_eq!(it.out, [0x00, 0x11]);
        it.send(begin + 20 * MS);
        assert_eq!(it.out.len(), 2, "both slots are taken");
        it.read(&[0x11], begin + 23 * MS).unwrap();
        it.send(begin + 24 * MS);
        assert_eq!(it.out[2..], [0x21], "the slot is used again");
        let tally = it.tally.borrow();
        assert_eq!((tally.requests, tally.answered, tally.sent), (3, 1, 3));
        assert!((tally.writes.max_us() - 3000.0).abs() < 10.0);
    }

    #[test]
    fn stopped_run_waits_for_the_requests_in_flight() {
        let (mut it, begin) = conversation(None, 2);
        it.send(begin + 20 * MS);
        it.run.stop();
        it.read(&[0x00], begin + 21 * MS).unwrap();
        it.send(Instant::now() + MS);
        assert_eq!(it.sent, 2, "a slot is free");
        assert!(!it.is_over(begin + 22 * MS));
        it.read(&[0x11], begin + 22 * MS).unwrap();
        assert!(it.is_over(begin + 22 * MS));
    }

    #[test]
    fn open_loop_latency_counts_from_the_due_time() {
        // A request is due every 10 ms, and the server does not answer for 40 ms.
        let (mut it, begin) = conversation(Some(100.0), 1);
        it.send(begin + 10 * MS);
        it.read(&[0x00], begin + 50 * MS).unwrap();
        it.send(begin + 50 * MS);
        it.read(&[0x10], begin + 51 * MS).unwrap();
        let tally = it.tally.borrow();
        // The first request was due at once, in the warm-up. The second was due at 10 ms and sent
        // 40 ms late.
        assert_eq!((tally.sent, tally.requests, tally.answered), (2, 1, 1));
        assert!((tally.late.max_us() - 40_000.0).abs() < 100.0);
        assert!((tally.writes.max_us() - 41_000.0).abs() < 100.0);
    }

    #[test]
    fn open_loop_lasts_until_the_end_of_the_window() {
        // Requests are due at 0, 100 and 200 ms, and the window ends at 110 ms.
        let (mut it, begin) = conversation(Some(10.0), 1);
        for (sent, number) in [(0_u32, 0x00), (100, 0x10)] {
            it.send(begin + sent * MS);
            it.read(&[number], begin + (sent + 1) * MS).unwrap();
        }
        it.send(begin + 101 * MS);
        assert!(!it.is_over(begin + 101 * MS));
        it.send(begin + 110 * MS);
        assert!(it.is_over(begin + 110 * MS));
        assert_eq!(it.sent, 2);
    }

    #[test]
    fn answer_after_the_window_is_no_throughput() {
        let (mut it, begin) = conversation_of(Job::Mix { reads: 100 }, Some(100.0), 8);
        it.protocol.reply = Reply::Nothing;
        it.send(begin + 20 * MS);
        it.read(&[0x00], begin + 30 * MS).unwrap();
        it.read(&[0x11, 0x22], begin + 115 * MS).unwrap();
        let tally = it.tally.borrow();
        // Requests were due at 0, in the warm-up, at 10 and at 20.
        assert_eq!((tally.answered, tally.reads.count()), (2, 2));
        assert_eq!((tally.arrived, tally.arrived_reads), (1, 1));
    }

    #[test]
    fn only_requests_of_the_window_are_measured() {
        let (mut it, begin) = conversation(None, 1);
        for (sent, answered) in [(5, 8), (9, 12), (50, 60), (109, 112)] {
            it.send(begin + sent * MS);
            let number = it.sent as u8 - 1;
            it.read(&[number << 4], begin + answered * MS).unwrap();
        }
        it.send(begin + 113 * MS);
        assert!(it.is_over(begin + 113 * MS));
        let tally = it.tally.borrow();
        // In the window, requests began at 50 and 109, and answers arrived at 12 and 60.
        assert_eq!((tally.sent, tally.replied), (4, 4));
        assert_eq!((tally.requests, tally.answered, tally.arrived), (2, 2, 2));
    }

    #[test]
    fn late_answer_is_counted_as_one_error() {
        let (mut it, begin) = conversation(None, 1);
        it.send(begin + 20 * MS);
        it.check_timeouts(begin + 69 * MS);
        assert_eq!(it.tally.borrow().failed, 0);
        it.check_timeouts(begin + 70 * MS);
        it.check_timeouts(begin + 71 * MS);
        it.read(&[0x00], begin + 72 * MS).unwrap();
        it.send(begin + 72 * MS);
        assert_eq!(it.sent, 2, "its slot is free again");
        let tally = it.tally.borrow();
        assert_eq!((tally.requests, tally.answered, tally.failed), (2, 0, 1));
        assert_eq!(
            tally.errors.kinds().collect::<Vec<_>>(),
            [("no answer within 50ms", 1)]
        );
    }

    #[test]
    fn due_request_that_is_not_sent_is_an_error() {
        let (mut it, begin) = conversation(Some(1000.0), 1);
        it.send(begin + 30 * MS);
        it.end(Some("connection lost: gone"), begin + 60 * MS);
        let tally = it.tally.borrow();
        let errors: Vec<_> = tally.errors.kinds().collect();
        assert_eq!(
            errors,
            [("connection lost: gone", 1), ("not sent in time", 59)]
        );
        // One request was due each millisecond from 10 to 59.
        assert_eq!((tally.requests, tally.failed, tally.sent), (50, 50, 1));
    }

    #[test]
    fn lost_idle_connection_is_an_error() {
        let (mut it, begin) = conversation(None, 1);
        it.end(Some("connection lost: gone"), begin);
        assert_eq!(it.tally.borrow().errors.count(), 1);
    }

    #[test]
    fn refused_key_ends_the_fill_and_is_the_only_error() {
        let (mut it, begin) = conversation_of(Job::Fill, None, 3);
        it.send(begin);
        it.protocol.reply = Reply::Refused(b"quota");
        it.read(&[0x11], begin + MS).unwrap();
        assert!(it.is_over(begin + MS));
        it.end(None, begin + MS);
        let tally = it.tally.borrow();
        let errors: Vec<_> = tally.errors.kinds().collect();
        assert_eq!(errors, [("refused: quota", 1)]);
    }

    /// Regression: the removal waited for up to 24 hours if the server stopped answering.
    #[test]
    fn timeout_ends_a_fill_and_a_removal() {
        for job in [Job::Fill, Job::Clean] {
            let (mut it, begin) = conversation_of(job, None, 3);
            it.send(begin);
            it.check_timeouts(begin + 49 * MS);
            assert!(!it.is_over(begin + 49 * MS));
            it.check_timeouts(begin + 50 * MS);
            assert!(it.is_over(begin + 50 * MS), "before the end of the window");
            it.end(None, begin + 50 * MS);
            let tally = it.tally.borrow();
            let errors: Vec<_> = tally.errors.kinds().collect();
            assert_eq!(errors, [("no answer within 50ms", 3)]);
        }
    }

    #[test]
    fn answer_without_a_request_is_an_error() {
        let (mut it, begin) = conversation(None, 1);
        it.send(begin + 20 * MS);
        it.read(&[0x10, 0x05], begin + 21 * MS).unwrap();
        assert_eq!(it.tally.borrow().errors.count(), 2);
        assert_eq!(it.tally.borrow().answered, 0);
    }
}
