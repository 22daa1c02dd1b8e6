//! Clients open and end connections, and the network cuts them.

use statehouse_tests::{Connect, Property, Publish};

use crate::client::{Link, Sent};
use crate::oracle::{Change, NO_RECORDS};
use crate::packet::{self, Level};
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
        let mut connect = Connect::new(&client.name);
        connect.clean_start = false;
        let will_delay_s = client.will_delay_s;
        if let Some(delay_s) = will_delay_s {
            let mut will = Publish::new(&format!("will/{}", client.name), format!("w{number}"));
            if level == Level::Five {
                // Written also if it is 0.
                will = will.with(Property::WillDelay(delay_s));
            }
            connect = connect.will(will.qos(2), 0);
        }
        let bytes = match level {
            Level::Four => connect.bytes3(),
            Level::Five => {
                let connect = connect.with(Property::SessionExpiry(client.expiry_s));
                let connect = connect.with(Property::ReceiveMaximum(client.receive_max));
                connect.bytes()
            }
        };
        let mut link = Link::new(number, level);
        link.send(bytes, Sent::Connect { will_delay_s });
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
