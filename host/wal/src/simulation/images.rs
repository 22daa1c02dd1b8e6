//! Every directory that a crash may leave in a recorded run.
//!
//! Enters: the recording of a simulated disk. Leaves: disks, one for each step and each choice of what
//! reached the device by then.

use std::collections::BTreeSet;

use super::{Event, SECTOR_BYTES, Simulation, World, fresh};
use crate::log::locked;

/// Unsynced sectors and names up to which every subset of them becomes a crash image.
const EVERY_SUBSET_MAX: usize = 5;

/// A directory as some crash may leave it.
#[derive(Debug)]
pub struct Image {
    /// The directory.
    pub disk: Simulation,
    /// The last [`Simulation::mark`] before the crash.
    pub marked: u64,
    /// Which crash: for a failing test to print.
    pub story: String,
}

impl Simulation {
    /// Starts to record, for [`Simulation::images`]. The directory must be empty.
    pub fn record(&self) {
        locked(&self.world).trace = Some(Vec::new());
    }

    /// Notes in the recording what was promised up to now, such as the last durable position.
    pub fn mark(&self, promised: u64) {
        locked(&self.world).note(|| Event::Mark(promised));
    }

    /// Goes through the directories that a crash may leave after every single step of the recording:
    /// without what was not synced, with all of it, with each part of it alone, with all but each
    /// part, and where there are few parts with every choice of them.
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
