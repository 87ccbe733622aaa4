(* T6b: EMA momentum with frozen idle blocks keeps block descent. The energy
     E = f x + eta beta / (2 (1 - beta)) |m|^2
   falls by at least eta (1 - eta L_i / 2) |m_i'|^2 at each step: every eta < 2/L_max, every 0 <= beta < 1, any
   order of blocks, f not convex. Summed: a bound on the gradients used. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum Vectors Blocks BlockDescent.
Open Scope R_scope.

(* b t is the block of step t; the idle entries of m and x do not move *)
Definition frozen_momentum (blk b : nat -> nat) (grad : vec -> vec) (eta beta : R) (x m : nat -> vec) : Prop :=
  forall t, m (S t) = (fun j => if Nat.eqb (blk j) (b t) then beta * m t j + (1 - beta) * grad (x t) j else m t j)
    /\ x (S t) = axpy (x t) (- eta) (proj blk (b t) (m (S t))).

Section Frozen.
Variables (n : nat) (blk b : nat -> nat) (f : vec -> R) (grad : vec -> vec) (L : nat -> R) (Lmax eta beta fmin : R).
Variables x m : nat -> vec.
Hypothesis smooth : block_smooth n blk f grad L.
Hypothesis L_le : forall i, L i <= Lmax.
Hypothesis eta_pos : 0 < eta.
Hypothesis beta01 : 0 <= beta < 1.
Hypothesis run : frozen_momentum blk b grad eta beta x m.

Let g t := proj blk (b t) (grad (x t)).         (* the gradient used at step t *)
Let new t := proj blk (b t) (m (S t)).          (* the selected block's momentum after step t *)
Let old t := proj blk (b t) (m t).
Definition energy (mm xx : vec) := f xx + eta * beta / (2 * (1 - beta)) * nrm n mm ^ 2.

Lemma new_eq t : new t = axpy (fun j => beta * old t j) (1 - beta) (g t).
Proof.
  destruct (run t) as [Hm _]. apply functional_extensionality. intros j.
  unfold new, old, g, axpy, proj. rewrite Hm. destruct (Nat.eqb (blk j) (b t)); ring.
Qed.

Lemma mass t : nrm n (m (S t)) ^ 2 = nrm n (m t) ^ 2 - nrm n (old t) ^ 2 + nrm n (new t) ^ 2.
Proof.
  enough (H : nrm n (m (S t)) ^ 2 + nrm n (old t) ^ 2 = nrm n (m t) ^ 2 + nrm n (new t) ^ 2) by lra.
  destruct (run t) as [Hm _]. rewrite !nrm_sq. unfold new, old. rewrite Hm.
  unfold dot, proj. rewrite <- !psum_plus. apply psum_ext. intros j _.
  destruct (Nat.eqb (blk j) (b t)); ring.
Qed.

(* <g, new> and |g|^2 through the two momenta *)
Lemma inner t : (1 - beta) * dot n (g t) (new t) = nrm n (new t) ^ 2 - beta * dot n (old t) (new t).
Proof.
  rewrite nrm_sq. rewrite (new_eq t) at 2.
  rewrite (dot_comm n (axpy _ _ _)), dot_axpy_r, (dot_comm n (new t) (g t)).
  replace (dot n (new t) (fun j => beta * old t j)) with (beta * dot n (old t) (new t)); [ring|].
  unfold dot. rewrite <- psum_scal. apply psum_ext. intros; ring.
Qed.

Lemma young t : 2 * dot n (old t) (new t) <= nrm n (old t) ^ 2 + nrm n (new t) ^ 2.
Proof.
  pose proof (dot_self_nonneg n (axpy (old t) (-1) (new t))) as H.
  rewrite dot_axpy_sq, <- !nrm_sq in H. lra.
Qed.

Theorem frozen_energy t : energy (m (S t)) (x (S t))
  <= energy (m t) (x t) - eta * (1 - eta * L (b t) / 2) * nrm n (new t) ^ 2.
Proof.
  destruct (run t) as [_ Hx]. unfold energy. rewrite Hx.
  pose proof (smooth (b t) (x t) (- eta) (m (S t))) as S.
  fold (g t) (new t) in S. fold (new t).
  rewrite (mass t). pose proof (inner t) as I. pose proof (young t) as Y.
  set (a := nrm n (new t) ^ 2) in *. set (c := nrm n (old t) ^ 2) in *.
  set (e := dot n (old t) (new t)) in *. set (d := dot n (g t) (new t)) in *.
  assert (D : - eta * d <= - eta / (1 - beta) * (a - beta * ((a + c) / 2))).
  { replace d with ((a - beta * e) / (1 - beta)) by (rewrite <- I; field; lra).
    apply Rminus_le.
    replace (- eta * ((a - beta * e) / (1 - beta)) - - eta / (1 - beta) * (a - beta * ((a + c) / 2)))
      with (eta * beta / (1 - beta) * (e - (a + c) / 2)) by (field; lra).
    assert (0 <= eta * beta / (1 - beta)) by (apply div_nonneg; [apply Rmult_le_pos|]; lra).
    nra. }
  set (K := nrm n (m t) ^ 2) in *.
  apply Rle_trans with (f (x t) + - eta / (1 - beta) * (a - beta * ((a + c) / 2))
    + L (b t) / 2 * (- eta) ^ 2 * a + eta * beta / (2 * (1 - beta)) * (K - c + a)); [lra|].
  right. field. lra.
Qed.

(* Summed: gradients against new momenta. *)
Lemma grad_sq t : (1 - beta) ^ 2 * nrm n (g t) ^ 2
  <= (1 + beta) * nrm n (new t) ^ 2 + beta * (1 + beta) * nrm n (old t) ^ 2.
Proof.
  assert (E : (fun j => (1 - beta) * g t j) = axpy (new t) (- beta) (old t)).
  { apply functional_extensionality. intros j. rewrite new_eq. unfold axpy. ring. }
  assert (F : (1 - beta) ^ 2 * nrm n (g t) ^ 2 = dot n (axpy (new t) (- beta) (old t)) (axpy (new t) (- beta) (old t))).
  { rewrite <- E, nrm_sq. unfold dot. rewrite <- psum_scal. apply psum_ext. intros; ring. }
  rewrite F, dot_axpy_sq, <- !nrm_sq, (dot_comm n (new t)).
  assert (Y : - (nrm n (old t) ^ 2 + nrm n (new t) ^ 2) <= 2 * dot n (old t) (new t)).
  { pose proof (dot_self_nonneg n (axpy (old t) 1 (new t))) as H.
    rewrite dot_axpy_sq, <- !nrm_sq in H. lra. }
  nra.
Qed.

Hypothesis m0 : nrm n (m 0%nat) = 0.
Hypothesis below : forall y, fmin <= f y.
Hypothesis eta_lt : eta * Lmax < 2.

Let D := (f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2)).

Lemma sum_new T : psum (fun t => nrm n (new t) ^ 2) T <= D.
Proof.
  assert (k_pos : 0 < eta * (1 - eta * Lmax / 2)) by (apply Rmult_lt_0_compat; lra).
  assert (H : eta * (1 - eta * Lmax / 2) * psum (fun t => nrm n (new t) ^ 2) T
              <= energy (m 0%nat) (x 0%nat) - energy (m T) (x T)).
  { induction T as [|T IH]; [simpl; lra|]. rewrite psum_S.
    pose proof (frozen_energy T) as E. pose proof (L_le (b T)).
    assert (eta * (1 - eta * Lmax / 2) * nrm n (new T) ^ 2 <= eta * (1 - eta * L (b T) / 2) * nrm n (new T) ^ 2).
    { apply Rmult_le_compat_r; [apply pow2_ge_0|]. apply Rmult_le_compat_l; [lra|]. nra. }
    lra. }
  unfold energy in H. rewrite m0 in H. specialize (below (x T)).
  assert (0 <= eta * beta / (2 * (1 - beta))) by (apply div_nonneg; [apply Rmult_le_pos|]; lra).
  pose proof (pow2_ge_0 (nrm n (m T))).
  unfold D. apply Rmult_le_reg_l with (eta * (1 - eta * Lmax / 2)); [exact k_pos|].
  replace (eta * (1 - eta * Lmax / 2) * ((f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2))))
    with (f (x 0%nat) - fmin) by (field; split; lra). nra.
Qed.

Lemma sum_old T : psum (fun t => nrm n (old t) ^ 2) T <= psum (fun t => nrm n (new t) ^ 2) T.
Proof.
  enough (H : psum (fun t => nrm n (old t) ^ 2) T + nrm n (m T) ^ 2 = psum (fun t => nrm n (new t) ^ 2) T)
    by (pose proof (pow2_ge_0 (nrm n (m T))); lra).
  induction T as [|T IH]; [simpl; rewrite m0; ring|]. rewrite !psum_S, mass. lra.
Qed.

Theorem frozen_sum T : psum (fun t => nrm n (g t) ^ 2) T <= ((1 + beta) / (1 - beta)) ^ 2 * D.
Proof.
  assert (H : (1 - beta) ^ 2 * psum (fun t => nrm n (g t) ^ 2) T <= (1 + beta) ^ 2 * D).
  { rewrite <- psum_scal.
    eapply Rle_trans; [apply psum_le; intros t _; apply grad_sq|].
    rewrite psum_plus, !psum_scal. pose proof (sum_old T). pose proof (sum_new T).
    assert (beta * (1 + beta) * psum (fun t => nrm n (old t) ^ 2) T <= beta * (1 + beta) * D)
      by (apply Rmult_le_compat_l; nra). nra. }
  apply Rmult_le_reg_l with ((1 - beta) ^ 2); [apply pow_lt; lra|].
  replace ((1 - beta) ^ 2 * (((1 + beta) / (1 - beta)) ^ 2 * D)) with ((1 + beta) ^ 2 * D) by (field; lra).
  exact H.
Qed.
End Frozen.
