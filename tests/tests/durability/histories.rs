//! Concurrent clients on a few keys, while the process is killed repeatedly. The answers on each
//! key must be linearizable: an order of the commands must explain all of them (see
//! `linearizable`).

use statehouse_tests::{
    Server,
    histories::{Manner, Play},
};

fn check_linearizability(kills: u32) {
    let mut server = Server::restartable(&[]);
    let manners = [
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: false },
        Manner::Forgets,
        Manner::Forgets,
    ];
    let mut play = Play::begin(&server, &manners);
    for _ in 0..kills {
        play.go_on();
        server.kill();
        play.died();
        server.restart();
    }
    play.end();
}

#[test]
fn answers_over_10_kills_are_linearizable() {
    check_linearizability(10);
}

#[test]
#[ignore = "takes minutes"]
fn answers_over_100_kills_are_linearizable() {
    check_linearizability(100);
}
