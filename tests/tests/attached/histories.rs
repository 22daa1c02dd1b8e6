//! Concurrent clients on a few keys while everything breaks that can: for each key there is an order of commands that
//! explains every answer (see `linearizable`). Clients ask again over each new connection until they are answered, and
//! so does the broker.

use std::{thread, time::Duration};

use statehouse_tests::{
    histories::{Manner, Play},
    mosquitto::PERSISTENT,
};

use crate::scene::Scene;

/// What a network, a machine and an operator do.
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

fn every_key_is_linearizable(faults: usize) {
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
        // Each comes as often as the others.
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
fn answers_over_12_faults_can_be_explained() {
    every_key_is_linearizable(12);
}

#[test]
#[ignore = "takes minutes"]
fn answers_over_400_faults_can_be_explained() {
    every_key_is_linearizable(400);
}
