//! Concurrent clients on a few keys while the process is killed again and again: for each key there is an order of
//! commands that explains every answer (see `linearizable`).

use statehouse_tests::{
    Server,
    histories::{Manner, Play},
};

fn every_key_is_linearizable(kills: u32) {
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
fn answers_over_10_kills_can_be_explained() {
    every_key_is_linearizable(10);
}

#[test]
#[ignore = "takes minutes"]
fn answers_over_100_kills_can_be_explained() {
    every_key_is_linearizable(100);
}
