//! The moves that are allowed, declared once.

use std::{collections::HashSet, fmt};

use super::State;

/// The moves that a row may make.
///
/// ```
/// # diesel::table! { orders (id) { id -> BigInt, status -> Text, } }
/// # actix_idempotency::states! {
/// #     enum OrderState for orders.status { Pending = "PENDING", Paid = "PAID", Shipped = "SHIPPED", Cancelled = "CANCELLED" }
/// # }
/// use OrderState::*;
/// use actix_idempotency::Machine;
///
/// let orders = Machine::starting_at(Pending)
///     .allow(Pending, [Paid, Cancelled])
///     .allow(Paid, [Shipped, Cancelled])
///     .ending_at([Shipped, Cancelled])
///     .build();
///
/// assert!(orders.allows(Paid, Shipped));
/// assert!(!orders.allows(Shipped, Cancelled));
/// ```
///
/// Build it where the program starts, and share it: a machine that makes no sense stops the program there.
#[derive(Debug, Clone)]
pub struct Machine<S> {
    moves: Vec<(S, S)>,
}

impl<S: State> Machine<S> {
    /// Rows are made in this state.
    pub fn starting_at(start: S) -> MachineBuilder<S> {
        MachineBuilder { start, moves: Vec::new(), finals: Vec::new() }
    }

    /// Whether a row may go from the one to the other.
    #[must_use]
    pub fn allows(&self, from: S, to: S) -> bool {
        self.moves.contains(&(from, to))
    }
}

/// A [`Machine`] under construction.
#[derive(Debug, Clone)]
#[must_use = "it is checked when it is built"]
pub struct MachineBuilder<S> {
    start: S,
    moves: Vec<(S, S)>,
    finals: Vec<S>,
}

impl<S: State> MachineBuilder<S> {
    /// The moves out of a state.
    pub fn allow(mut self, from: S, to: impl IntoIterator<Item = S>) -> Self {
        self.moves.extend(to.into_iter().map(|to| (from, to)));
        self
    }

    /// States that a row never leaves.
    pub fn ending_at(mut self, finals: impl IntoIterator<Item = S>) -> Self {
        self.finals.extend(finals);
        self
    }

    /// The machine.
    ///
    /// # Panics
    ///
    /// Where [`try_build`](Self::try_build) fails.
    #[track_caller]
    #[must_use]
    pub fn build(self) -> Machine<S> {
        self.try_build().unwrap_or_else(|invalid| panic!("{invalid}"))
    }

    /// The machine, if it makes sense.
    ///
    /// # Errors
    ///
    /// [`InvalidMachine`]: a state that is never reached, a final one that is left, one that is not final and
    /// has no way out, a move declared twice or to where it starts, two states with one label.
    pub fn try_build(self) -> Result<Machine<S>, InvalidMachine> {
        let invalid = |state: S, why| Err(InvalidMachine { state: format!("{state:?}"), why });
        let (mut labels, mut moves) = (HashSet::new(), Vec::new());
        for &state in S::ALL {
            if !labels.insert(state.label()) {
                return invalid(state, "has the label of another state");
            }
        }
        for &(from, to) in &self.moves {
            match () {
                () if from == to => return invalid(from, "moves to itself: a repeat is `Already`, not a move"),
                () if self.finals.contains(&from) => return invalid(from, "is final and has a move out of it"),
                () if moves.contains(&(from, to)) => return invalid(from, "has a move that is declared twice"),
                () => moves.push((from, to)),
            }
        }
        let reached = self.reached();
        for &state in S::ALL {
            if !reached.contains(&state) {
                return invalid(state, "is never reached");
            }
            if !self.finals.contains(&state) && !moves.iter().any(|(from, _)| *from == state) {
                return invalid(state, "has no move out of it and is not declared final");
            }
        }
        Ok(Machine { moves })
    }

    fn reached(&self) -> Vec<S> {
        let mut reached = vec![self.start];
        let mut next = 0;
        while let Some(&from) = reached.get(next) {
            for &(_, to) in self.moves.iter().filter(|(start, _)| *start == from) {
                if !reached.contains(&to) {
                    reached.push(to);
                }
            }
            next += 1;
        }
        reached
    }
}

/// A machine that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidMachine {
    state: String,
    why: &'static str,
}

impl fmt::Display for InvalidMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the state {} {}", self.state, self.why)
    }
}

impl std::error::Error for InvalidMachine {}

#[cfg(test)]
mod tests {
    use super::*;

    diesel::table! {
        lamps (id) { id -> BigInt, state -> Text, }
    }

    crate::states! {
        enum Lamp for lamps.state { Off = "off", On = "on", Broken = "broken" }
    }
    use Lamp::{Broken, Off, On};

    #[track_caller]
    fn assert_invalid(machine: MachineBuilder<Lamp>, why: &str) {
        assert_eq!(machine.try_build().unwrap_err().to_string(), why);
    }

    #[test]
    fn a_machine_that_makes_sense_is_built() {
        let lamp = Machine::starting_at(Off).allow(Off, [On]).allow(On, [Off, Broken]).ending_at([Broken]).build();
        assert!(lamp.allows(On, Off) && !lamp.allows(Off, Broken));
    }

    #[test]
    fn a_machine_that_makes_no_sense_is_not() {
        let lamp = || Machine::starting_at(Off).allow(Off, [On]).allow(On, [Off]);
        assert_invalid(lamp().ending_at([Broken]), "the state Broken is never reached");
        let lamp = || lamp().allow(On, [Broken]);
        assert_invalid(lamp(), "the state Broken has no move out of it and is not declared final");
        let lamp = || lamp().ending_at([Broken]);
        assert_invalid(lamp().allow(Broken, [Off]), "the state Broken is final and has a move out of it");
        assert_invalid(lamp().allow(Off, [On]), "the state Off has a move that is declared twice");
        assert_invalid(lamp().allow(On, [On]), "the state On moves to itself: a repeat is `Already`, not a move");
    }

    #[test]
    #[should_panic(expected = "the state Broken is never reached")]
    fn building_it_panics() {
        let _ = Machine::starting_at(Off).allow(Off, [On]).allow(On, [Off]).build();
    }
}
