// The simulation of a schedule.
#pragma once

#include "simulate/question.h"

namespace avgpipe::simulate {

// Fills the answer. Needs numbers that make sense: avgpipe/planning/engine.py checks them.
Status simulate(const Question& question, Answer& answer);

}  // namespace avgpipe::simulate
