//! The random events of a run: requests, faults, crashes, snapshots, and changes of clock and
//! policy.

use statehouse_core::Input;
use statehouse_core::log::{Progress, sessions_block};
use statehouse_core::policy::{Canary, CanaryRule, Instance};
use statehouse_core::store::{Key, Mode, Peer};
use statehouse_mqtt::simulation::session_began;

use crate::policies;
use crate::world::World;

impl World {
    pub(crate) fn random_event(&mut self) {
        let index = self.dice.below(self.clients.len() as u64) as usize;
        if self.dice.once_in(self.fault_plan.commit_once_in) {
            self.log_event(0);
            return;
        }
        if self.dice.once_in(self.fault_plan.crash_once_in) {
            match self.dice.below(4) {
                0 => self.restart(true),
                1 => self.restart_cleanly(),
                _ => self.restart(false),
            }
            return;
        }
        match self.dice.below(100) {
            0..=44 => self.send(index),
            45..=59 => {
                for _ in 0..1 + self.dice.below(4) {
                    self.clients[index].read();
                }
            }
            60..=65 => {
                let which = self.dice.below(4);
                self.log_event(which);
            }
            66..=78 => self.snapshot_event(),
            79..=81 => self.maintain(),
            82..=86 => self.advance_time(),
            87 | 88 => self.step(Input::Sweep),
            89..=92 if self.mode == Mode::Foreign => self.lose_link(),
            89..=92 => self.disconnect(index),
            93 if self.mode == Mode::Foreign => self.report_absence(index),
            93 if self.fault_plan.session_ends => {
                let all = self.dice.once_in(2);
                for index in 0..self.clients.len() {
                    if all || self.dice.once_in(2) {
                        self.end_session(index);
                    }
                }
            }
            94 | 95 if self.fault_plan.policy_swaps => self.change_assignment(),
            96 if self.fault_plan.disk_faults => self.inject_disk_fault(),
            97 if self.fault_plan.full_disk => self.toggle_full_disk(),
            98 => self.check_recovery_of_copy(),
            _ => self.send_duplicate(index),
        }
    }

    /// The store loses its own connection to a foreign broker.
    fn lose_link(&mut self) {
        self.trace.record("the link is lost".into());
        self.tally.count("losses of the link");
        for client in &mut self.clients {
            client.disconnect();
        }
    }

    /// A foreign broker reports that a client disconnected, or that a notification was
    /// undeliverable.
    fn report_absence(&mut self, index: usize) {
        let peer = self.peer(index);
        let key = Key::from(format!("key {}", self.dice.below(self.workload.keys)));
        self.tally.count("reports of absent clients");
        match self.dice.below(2) {
            0 => {
                self.trace
                    .record(format!("{} is reported as disconnected", peer.client));
                self.step(Input::Disconnected(&peer));
            }
            _ => {
                self.trace.record(format!(
                    "a notification of {key:?} to {} is undeliverable",
                    peer.client
                ));
                self.step(Input::Undeliverable(&peer, &key));
            }
        }
    }

    /// A foreign broker redelivers an acknowledged request, because its client sent it again.
    fn redeliver_acknowledged(&mut self, index: usize) {
        let which = self.dice.roll();
        if let Some(at) = self.clients[index].reopen_acknowledged(which) {
            self.tally.count("redeliveries of acknowledged requests");
            self.handle_request(index, at);
        }
    }

    /// Sends a request again over the same connection. MQTT forbids this, but DUP marks the packet
    /// as a duplicate.
    fn send_duplicate(&mut self, index: usize) {
        if self.mode == Mode::Foreign && self.dice.once_in(2) {
            self.redeliver_acknowledged(index);
            return;
        }
        let client = &self.clients[index];
        let Some(connection) = client.connection.filter(|_| client.sets_dup) else {
            return;
        };
        let mut in_flight = client.in_flight.iter();
        if let Some(at) = in_flight.position(|it| it.last_connection == connection) {
            self.handle_request(index, at);
        }
    }

    fn log_event(&mut self, which: u64) {
        let result = match which {
            1 => self.log.write(),
            2 => self.log.sync().map(drop),
            _ => self.log.commit().map(drop),
        };
        self.trace.record(format!(
            "{} to {} of {}: {:?}",
            ["commits", "writes", "syncs", "commits"][which as usize],
            self.log.durable(),
            self.log.appended(),
            result.as_ref().err(),
        ));
        if let Err(error) = result {
            assert!(error.is_full() || self.log.failure().is_some(), "{error}");
        }
    }

    /// Begins, continues or drops a snapshot. The store handles requests between its blocks.
    fn snapshot_event(&mut self) {
        let now_ms = self.now();
        let Some((mut snapshot, mut progress, steps)) = self.snapshot.take() else {
            if let Ok(Some(mut snapshot)) = self.log.begin_snapshot(now_ms) {
                self.trace
                    .record(format!("begins a snapshot at {}", snapshot.position()));
                let embedded = self.mode == Mode::Embedded;
                for client in self.clients.iter().filter(|_| embedded) {
                    let block = sessions_block(&session_began(client.session, &client.name));
                    if snapshot.block(&block).is_err() {
                        return;
                    }
                }
                self.snapshot = Some((snapshot, Progress::default(), 0));
            }
            return;
        };
        if self.dice.once_in(30) {
            drop(snapshot);
            return;
        }
        for _ in 0..1 + self.dice.below(4) / 3 {
            let block = self.core.snapshot(&mut progress, now_ms);
            let Some(block) = block else {
                let began = snapshot.position();
                let finished = self.log.finish_snapshot(snapshot);
                self.trace.record(format!(
                    "the snapshot of {began} ends at {}: {finished:?}",
                    self.log.appended()
                ));
                if finished.is_ok() && steps > 2 {
                    self.tally.count("snapshots over several steps");
                }
                return;
            };
            self.trace.record(format!(
                "  a block of {} bytes, kind {}",
                block.len(),
                block[0]
            ));
            if snapshot.block(&block).is_err() {
                return;
            }
        }
        self.snapshot = Some((snapshot, progress, steps + 1));
    }

    fn maintain(&mut self) {
        let now_ms = self.now();
        let result = self.log.maintain(now_ms);
        self.trace
            .record(format!("maintains the log: {:?}", result.err()));
    }

    fn advance_time(&mut self) {
        let ms = match self.dice.below(10) {
            0 if self.fault_plan.long_waits => 700_000,
            1 if self.fault_plan.long_waits => 70_000,
            2 => 0,
            // Exactly to the next expiry.
            3 | 4 => {
                let next_ms = self.core.store().next_expiry_ms().unwrap_or(0);
                next_ms.saturating_sub(self.now_ms).min(2_000)
            }
            _ => self.dice.below(2_000),
        };
        self.source.advance(ms);
        if self.fault_plan.clock_jumps && self.dice.once_in(4) {
            let wall_ms = self.now_ms + self.dice.below(200_000);
            self.source.set_wall(wall_ms.saturating_sub(100_000));
        }
        let now_ms = self.now();
        self.trace.record(format!("the time is {now_ms}"));
    }

    fn disconnect(&mut self, index: usize) {
        let client = &mut self.clients[index];
        let session = client.session;
        if let Some(connection) = client.disconnect() {
            self.trace
                .record(format!("{} loses its connection", client.name));
            let client = client.name.clone();
            self.step(Input::Disconnected(&Peer {
                client,
                connection,
                session,
            }));
        }
    }

    /// Assigns a policy: as the active one, as a canary or to a route.
    fn change_assignment(&mut self) {
        let last = if self.workload.faulty_policy { 3 } else { 2 };
        let which = self.dice.below(last) as usize;
        let policy = policies::digest(which);
        let now = self.assignment.load(policy).expect("there is room");
        let key = self.dice.below(self.workload.keys);
        let (event, next) = match self.dice.below(8) {
            0..=2 => ("policy swaps", now.promote(policy)),
            3 => ("policy rollbacks", now.rollback()),
            4 => {
                let rule = match self.dice.below(3) {
                    0 => CanaryRule::Percent(100),
                    1 => CanaryRule::Clients(format!("client-{}", self.dice.below(4))),
                    _ => CanaryRule::Keys(format!("key {key}")),
                };
                ("canaries begun", now.canary(Some(Canary { policy, rule })))
            }
            5 => {
                // Some of these are prefixes of others.
                let prefix = format!("key {key}");
                ("routes set", now.route(prefix.as_bytes(), Some(policy)))
            }
            6 => ("canaries ended", now.canary(None)),
            _ => match now.routes.first().map(|route| route.prefix.0.clone()) {
                Some(prefix) => ("routes removed", now.route(&prefix, None)),
                None => return,
            },
        };
        // The assignment refuses changes that are not possible now.
        let Ok(next) = next else {
            return;
        };
        self.tally.count(event);
        self.trace.record(format!("{event}: {next:?}"));
        let ready = vec![Instance::new(policies::policy(which))];
        let assigned = self.core.assign(next.clone(), ready);
        assert!(assigned.is_ok(), "every named policy is ready");
        self.recorded.1 = Some(next.clone());
        self.assignment = next;
        self.capture_state();
    }

    fn inject_disk_fault(&mut self) {
        let after = self.dice.below(5);
        self.trace
            .record(format!("the disk will fail after {after} more operations"));
        match self.dice.below(2) {
            0 => self.disk.fail_write_in(Some(after)),
            _ => self.disk.fail_sync_in(Some(after)),
        }
    }

    fn toggle_full_disk(&mut self) {
        if self.dice.once_in(2) {
            let bytes = self.disk.used_bytes() + self.dice.below(20_000);
            self.trace
                .record(format!("the disk is limited to {bytes} bytes"));
            self.disk.limit_bytes(Some(bytes));
            self.tally.count("full disks");
        } else {
            self.clear_disk_faults();
        }
        // Maintenance makes the store notice the new limit.
        self.maintain();
    }

    pub(crate) fn clear_disk_faults(&mut self) {
        self.disk.limit_bytes(None);
        self.disk.fail_write_in(None);
        self.disk.fail_sync_in(None);
    }
}
