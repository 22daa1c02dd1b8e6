//! What happens in a run, at random.

use statehouse_core::Input;
use statehouse_core::log::{Progress, sessions_block};
use statehouse_core::policy::{Canary, CanaryRule, Instance};
use statehouse_core::store::{Key, Mode, Peer};
use statehouse_mqtt::simulation::session_began;

use crate::policies;
use crate::world::World;

impl World {
    /// One thing happens.
    pub(crate) fn event(&mut self) {
        let who = self.dice.below(self.clients.len() as u64) as usize;
        if self.dice.once_in(self.habits.commit_once_in) {
            self.log_event(0);
            return;
        }
        if self.dice.once_in(self.habits.crash_once_in) {
            match self.dice.below(4) {
                0 => self.restart(true),
                1 => self.restart_cleanly(),
                _ => self.restart(false),
            }
            return;
        }
        match self.dice.below(100) {
            0..=44 => self.send(who),
            45..=59 => {
                for _ in 0..1 + self.dice.below(4) {
                    self.clients[who].read();
                }
            }
            60..=65 => {
                let which = self.dice.below(4);
                self.log_event(which);
            }
            66..=78 => self.snapshot_event(),
            79..=81 => self.maintain(),
            82..=86 => self.time_passes(),
            87 | 88 => self.step(Input::Sweep),
            89..=92 if self.mode == Mode::Foreign => self.lose_the_link(),
            89..=92 => self.disconnect(who),
            93 if self.mode == Mode::Foreign => self.see_a_sign(who),
            93 if self.habits.ends => {
                let all = self.dice.once_in(2);
                for who in 0..self.clients.len() {
                    if all || self.dice.once_in(2) {
                        self.end_session(who);
                    }
                }
            }
            94 | 95 if self.habits.swaps => self.swap(),
            96 if self.habits.faults => self.arm(),
            97 if self.habits.full => self.fill_or_empty(),
            98 => self.look(),
            _ => self.send_twice(who),
        }
    }

    /// The store's own connection to a foreign broker.
    fn lose_the_link(&mut self) {
        self.story.tell("the link is lost".into());
        self.tally.count("losses of the link");
        for client in &mut self.clients {
            client.disconnect();
        }
    }

    /// Some source says that a client has gone, or nobody took a notification.
    fn see_a_sign(&mut self, who: usize) {
        let peer = self.peer(who);
        let key = Key::from(format!("key {}", self.dice.below(self.taste.keys)));
        self.tally.count("signs of presence");
        match self.dice.below(2) {
            0 => {
                self.story.tell(format!("{} has gone", peer.client));
                self.step(Input::Disconnected(&peer));
            }
            _ => {
                self.story
                    .tell(format!("{} does not hear of {key:?}", peer.client));
                self.step(Input::Undeliverable(&peer, &key));
            }
        }
    }

    /// A foreign broker brings one that it knows to be done with: its client asked it again.
    fn bring_again(&mut self, who: usize) {
        let which = self.dice.roll();
        if let Some(at) = self.clients[who].undo(which) {
            self.tally.count("acknowledged requests that came again");
            self.ask(who, at);
        }
    }

    /// Over the same connection again: no client should, but the flag says what it is.
    fn send_twice(&mut self, who: usize) {
        if self.mode == Mode::Foreign && self.dice.once_in(2) {
            self.bring_again(who);
            return;
        }
        let client = &self.clients[who];
        let Some(connection) = client.connection.filter(|_| client.sets_dup) else {
            return;
        };
        let mut places = client.in_flight.iter();
        if let Some(at) = places.position(|it| it.sent_over == connection) {
            self.ask(who, at);
        }
    }

    fn log_event(&mut self, which: u64) {
        let done = match which {
            1 => self.log.write(),
            2 => self.log.sync().map(drop),
            _ => self.log.commit().map(drop),
        };
        self.story.tell(format!(
            "{} to {} of {}: {:?}",
            ["commits", "writes", "syncs", "commits"][which as usize],
            self.log.durable(),
            self.log.appended(),
            done.as_ref().err(),
        ));
        if let Err(error) = done {
            assert!(error.is_full() || self.log.failure().is_some(), "{error}");
        }
    }

    /// A snapshot takes many steps, and requests are handled in between.
    fn snapshot_event(&mut self) {
        let now_ms = self.now();
        let Some((mut snapshot, mut progress, steps)) = self.snapshot.take() else {
            if let Ok(Some(mut snapshot)) = self.log.begin_snapshot(now_ms) {
                self.story
                    .tell(format!("begins a snapshot at {}", snapshot.position()));
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
                self.story.tell(format!(
                    "the snapshot of {began} ends at {}: {finished:?}",
                    self.log.appended()
                ));
                if finished.is_ok() && steps > 2 {
                    self.tally.count("snapshots over several steps");
                }
                return;
            };
            self.story.tell(format!(
                "  a piece of {} bytes, kind {}",
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
        let done = self.log.maintain(now_ms);
        self.story.tell(format!("maintains: {:?}", done.err()));
    }

    fn time_passes(&mut self) {
        let ms = match self.dice.below(10) {
            0 if self.habits.waits => 700_000,
            1 if self.habits.waits => 70_000,
            2 => 0,
            // To the very millisecond.
            3 | 4 => {
                let next_ms = self.core.store().next_expiry_ms().unwrap_or(0);
                next_ms.saturating_sub(self.now_ms).min(2_000)
            }
            _ => self.dice.below(2_000),
        };
        self.source.advance(ms);
        if self.habits.jumps && self.dice.once_in(4) {
            let wall_ms = self.now_ms + self.dice.below(200_000);
            self.source.set_wall(wall_ms.saturating_sub(100_000));
        }
        let now_ms = self.now();
        self.story.tell(format!("it is {now_ms}"));
    }

    fn disconnect(&mut self, who: usize) {
        let client = &mut self.clients[who];
        let session = client.session;
        if let Some(connection) = client.disconnect() {
            self.story
                .tell(format!("{} loses its connection", client.name));
            let client = client.name.clone();
            self.step(Input::Disconnected(&Peer {
                client,
                connection,
                session,
            }));
        }
    }

    /// Another policy answers, or answers a part.
    fn swap(&mut self) {
        let last = if self.taste.faulty { 3 } else { 2 };
        let which = self.dice.below(last) as usize;
        let policy = policies::digest(which);
        let now = self.assignment.load(policy).expect("there is room");
        let key = self.dice.below(self.taste.keys);
        let (what, next) = match self.dice.below(8) {
            0..=2 => ("policy swaps", now.promote(policy)),
            3 => ("rollbacks", now.rollback()),
            4 => {
                let rule = match self.dice.below(3) {
                    0 => CanaryRule::Percent(100),
                    1 => CanaryRule::Clients(format!("client-{}", self.dice.below(4))),
                    _ => CanaryRule::Keys(format!("key {key}")),
                };
                ("canaries", now.canary(Some(Canary { policy, rule })))
            }
            5 => {
                // Some of these are prefixes of others.
                let prefix = format!("key {key}");
                ("routes", now.route(prefix.as_bytes(), Some(policy)))
            }
            6 => ("ends of canaries", now.canary(None)),
            _ => match now.routes.first().map(|route| route.prefix.0.clone()) {
                Some(prefix) => ("ends of routes", now.route(&prefix, None)),
                None => return,
            },
        };
        // What makes no sense is refused.
        let Ok(next) = next else {
            return;
        };
        self.tally.count(what);
        self.story.tell(format!("{what}: {next:?}"));
        let ready = vec![Instance::new(policies::policy(which))];
        let assigned = self.core.assign(next.clone(), ready);
        assert!(assigned.is_ok(), "all that are named are here");
        self.recorded.1 = Some(next.clone());
        self.assignment = next;
        self.moment();
    }

    fn arm(&mut self) {
        let after = self.dice.below(5);
        self.story
            .tell(format!("the disk will fail after {after} more"));
        match self.dice.below(2) {
            0 => self.disk.fail_write_in(Some(after)),
            _ => self.disk.fail_sync_in(Some(after)),
        }
    }

    fn fill_or_empty(&mut self) {
        if self.dice.once_in(2) {
            let bytes = self.disk.used_bytes() + self.dice.below(20_000);
            self.story.tell(format!("the disk ends at {bytes} bytes"));
            self.disk.limit_bytes(Some(bytes));
            self.tally.count("full disks");
            // So that the store knows.
            self.maintain();
        } else {
            self.heal();
            self.maintain();
        }
    }

    /// The disk is well again.
    pub(crate) fn heal(&mut self) {
        self.disk.limit_bytes(None);
        self.disk.fail_write_in(None);
        self.disk.fail_sync_in(None);
    }
}
