//! The machine loses its power under load: what the process had not flushed is lost. The answers
//! must be linearizable (see `histories`).

use statehouse_tests::{
    Server,
    histories::{Manner, Play},
    small::{FileSystem, Small},
};

fn check_linearizability(losses: u32) {
    let Some(small) = Small::mount(FileSystem::Ext4, 128) else {
        return;
    };
    let mut server = Server::restartable(&[("data", &small.data())]);
    let manners = [
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: false },
        Manner::Forgets,
    ];
    let mut play = Play::begin(&server, &manners);
    for _ in 0..losses {
        play.go_on();
        small.lose_power();
        server.end();
        play.died();
        small.restore_power();
        server.restart();
    }
    play.end();
}

#[test]
fn answers_over_3_power_losses_are_linearizable() {
    check_linearizability(3);
}

#[test]
#[ignore = "takes a minute"]
fn answers_over_50_power_losses_are_linearizable() {
    check_linearizability(50);
}
