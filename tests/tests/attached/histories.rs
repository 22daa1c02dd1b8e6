//! Runs concurrent clients on a few keys while faults are injected, and checks that every key is
//! linearizable: some order of the commands must explain every answer (see `linearizable`). Clients
//! and the broker redeliver requests over each new connection until they are answered.

use std::{thread, time::Duration};

use statehouse_tests::{
    histories::{Manner, Play},
    mosquitto::PERSISTENT,
};

use crate::scene::Scene;

/// A fault of the network, of a machine, or an action of an operator.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Cut,
    KillStore,
    RestartBroker,
    PauseBroker,
}

const FAULTS: &[Fault] = &[
    Fault::Cut,
    Fault::KillStore,
    Fault::RestartBroker,
    Fault::PauseBroker,
];

fn assert_linearizable(faults: usize) {
    let mut scene = Scene::with(PERSISTENT, &[]);
    let manners = [
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: true },
        Manner::SendsAgain { dup: false },
        Manner::SendsAgain { dup: false },
    ];
    let mut play = Play::begin(&scene.host, &manners);
    for number in 0..faults {
        play.go_on();
        // All faults are equally frequent.
        match FAULTS[number % FAULTS.len()] {
            Fault::Cut => scene.proxy.cut(),
            Fault::KillStore => {
                scene.host.kill();
                thread::sleep(play.dice().below_ms(100));
                scene.host.restart();
            }
            Fault::RestartBroker => {
                scene.broker.stop();
                scene.broker.restart();
            }
            Fault::PauseBroker => {
                scene.broker.freeze();
                thread::sleep(Duration::from_millis(50) + play.dice().below_ms(100));
                scene.broker.thaw();
            }
        }
    }
    play.end();
}

#[test]
fn history_with_12_faults_is_linearizable() {
    assert_linearizable(12);
}

#[test]
#[ignore = "takes minutes"]
fn history_with_400_faults_is_linearizable() {
    assert_linearizable(400);
}
