//! Clients open and end connections, and the network cuts them.

use crate::client::{Link, Sent};
use crate::oracle::{Change, NO_RECORDS};
use crate::packet::{self, Connect, Level, Will};
use crate::world::World;

impl World {
    /// Opens a connection. If the client has one, the broker ends it when CONNECT arrives.
    pub(crate) fn connect(&mut self, who: usize) {
        // An earlier connection whose CONNECT has not arrived would take over this one.
        if self.clients[who].links.iter().any(|it| it.wire.is_none()) {
            return;
        }
        let number = self.next_link;
        self.next_link += 1;
        let client = &mut self.clients[who];
        let level = match client.messenger && self.dice.once_in(2) {
            true => Level::Four,
            false => Level::Five,
        };
        if level == Level::Four {
            self.tally.count("connections with MQTT 3.1.1");
        }
        let connect = Connect {
            level,
            client: client.name.clone(),
            clean_start: false,
            expiry_s: client.expiry_s,
            receive_max: client.receive_max,
            will: client.will_delay_s.map(|delay_s| Will {
                topic: format!("will/{}", client.name),
                payload: format!("w{number}").into_bytes(),
                delay_s,
            }),
        };
        let mut link = Link::new(number, level);
        link.send(packet::connect(&connect), Sent::Connect(connect));
        for link in &mut client.links {
            link.abandoned = true;
        }
        client.links.push(link);
        self.trace.add(|| format!("c{who} connects: link {number}"));
    }

    /// The client ends its connection by DISCONNECT.
    pub(crate) fn hang_up(&mut self, who: usize) {
        // The observer keeps its connection, and its session in any case.
        let with_will = self.dice.once_in(3);
        if let Some(link) = self.clients[who].open() {
            let reason = if with_will && link.level == Level::Five {
                4
            } else {
                0
            };
            let bytes = packet::disconnect(link.level, reason);
            link.send(bytes, Sent::Disconnect { reason });
            self.trace
                .add(|| format!("c{who} sends DISCONNECT {reason}"));
        }
    }

    /// The network loses a connection of a client, with everything on its way.
    pub(crate) fn cut(&mut self, who: usize) {
        let count = self.clients[who].links.len() as u64;
        if count > 0 {
            let at = self.dice.below(count) as usize;
            self.tally.count("connections cut");
            self.end(who, at, "cut");
        }
    }

    /// Both ends of a connection are over.
    pub(crate) fn end(&mut self, who: usize, at: usize, why: &str) {
        let link = self.clients[who].links.remove(at);
        self.trace
            .add(|| format!("link {} of c{who} ends: {why}", link.number));
        if let Some(wire) = link.wire {
            // The observer and the oracle know the end of a connection that was taken over.
            if !wire.is_closing() {
                self.detached(who, link.number);
            }
            drop(wire);
        }
        self.after();
    }

    /// The session has lost its connection, without DISCONNECT.
    pub(crate) fn detached(&mut self, who: usize, link: u64) {
        let expiry_s = self.clients[who].expiry_s;
        self.clients[who].detached_ms = self.elapsed_ms;
        let now_ms = self.elapsed_ms;
        self.wills.lost(link, expiry_s, now_ms, &mut self.tally);
        if expiry_s == 0 {
            self.oracle
                .note(NO_RECORDS, Change::SessionEnded { client: who });
        }
    }
}
