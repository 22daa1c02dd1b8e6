//! Every directory that a crash may leave during a recorded run.
//!
//! Input is the recording of a simulated disk. Output is one disk for each step and each choice of
//! the unsynced parts that reached the device.

use std::collections::BTreeSet;

use super::{Event, SECTOR_BYTES, Simulation, World, fresh};
use crate::log::locked;

/// Largest number of unsynced sectors and names of which every subset becomes a crash image.
const EVERY_SUBSET_MAX: usize = 5;

/// A directory as a crash may leave it.
#[derive(Debug)]
pub struct Image {
    /// The directory.
    pub disk: Simulation,
    /// The last [`Simulation::mark`] before the crash.
    pub marked: u64,
    /// Describes the crash, for the message of a failing test.
    pub story: String,
}

impl Simulation {
    /// Starts to record, for [`Simulation::images`]. The directory must be empty.
    pub fn record(&self) {
        locked(&self.world).trace = Some(Vec::new());
    }

    /// Adds a promise to the recording, such as the last durable position.
    pub fn mark(&self, promised: u64) {
        locked(&self.world).note(|| Event::Mark(promised));
    }

    /// Calls `each` with every directory that a crash may leave after each step of the recording:
    /// without the unsynced parts, with all of them, with each part alone, with all but each part,
    /// and if there are few parts with every subset.
    pub fn images(&self, each: &mut dyn FnMut(Image)) {
        let trace = locked(&self.world).trace.clone().unwrap_or_default();
        let entropy = locked(&self.world).entropy;
        let mut world = World {
            entropy,
            ..World::default()
        };
        let mut marked = 0;
        for (step, event) in trace.iter().enumerate() {
            world.apply(event);
            if let Event::Mark(promised) = event {
                marked = *promised;
            }
            let sectors: Vec<(usize, usize)> = (0..world.inodes.len())
                .flat_map(|inode| {
                    world.inodes[inode]
                        .dirty
                        .iter()
                        .map(move |&sector| (inode, sector))
                })
                .collect();
            let parts = sectors.len() + world.name_ops.len();
            for kept in choices(parts) {
                let mut image = world.clone();
                for (part, &(inode, sector)) in sectors.iter().enumerate() {
                    if kept.contains(&part) {
                        image.inodes[inode].store(sector, SECTOR_BYTES);
                    }
                }
                for (part, op) in std::mem::take(&mut image.name_ops).iter().enumerate() {
                    if kept.contains(&(sectors.len() + part)) {
                        op.apply(&mut image.durable_names);
                    }
                }
                image.lose();
                let story = format!(
                    "after step {step} ({}), kept {kept:?} of {parts}",
                    event.word()
                );
                each(Image {
                    disk: fresh(image),
                    marked,
                    story,
                });
            }
        }
    }
}

fn choices(parts: usize) -> Vec<BTreeSet<usize>> {
    if parts <= EVERY_SUBSET_MAX {
        let members = |set: usize| {
            (0..parts)
                .filter(move |part| set >> part & 1 == 1)
                .collect()
        };
        return (0..1 << parts).map(members).collect();
    }
    let mut choices = vec![BTreeSet::new(), (0..parts).collect()];
    for part in 0..parts {
        choices.push(BTreeSet::from([part]));
        choices.push((0..parts).filter(|&other| other != part).collect());
        choices.push((0..part).collect());
    }
    choices
}
